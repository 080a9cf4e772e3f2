"""Which version of its weights a stage uses for each micro-batch, and when versions come and go; no torch, no clock.

In a schedule that does not flush, every stage updates its weights while micro-batches are in flight on it. Version 0 is
what the order starts with; version v + 1 follows from the micro-batches v x every to (v + 1) x every - 1, and is there
when the last of their backwards on that stage has ended. Simulator, verifier and runtime all read this.

Where a stage is on several ranks, each of them adds up the gradients of its own micro-batches. The ranks sum them right
after their last backward of the update, in the order of their ranks, and all make the same step: a version has the same
number, and the same bits, on each of them. A rank starts nothing else until that sum is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op, Schedule
from pipeswift.trace import COMPUTE, Counter, Trace

WeightPolicy = Literal["stash", "vertical", "2bw", "none"]
WEIGHT_POLICIES: tuple[WeightPolicy, ...] = get_args(WeightPolicy)


class VersionError(PipeSwiftError):
    """A weight policy, or a number of micro-batches per update, that does not fit the schedule."""


class Life(NamedTuple):
    """One version of one stage on one rank.

    born: the micro-batch whose last backward publishes it, -1 for what the order starts with. dies: the micro-batch
    whose last backward is its last use.
    """

    rank: int
    stage: int
    version: int
    born: int
    dies: int


@dataclass(frozen=True)
class Versions:
    """The versions that a schedule's passes use.

    forward, backward: int64, shape (stages, micro-batches); what F, and what I, W or B of it use. They differ only
        under the policy "none".
    newest: likewise; the newest that is published where and when F starts.
    every: micro-batches per update.
    """

    policy: WeightPolicy
    every: int
    forward: np.ndarray
    backward: np.ndarray
    newest: np.ndarray
    lives: tuple[Life, ...]

    @property
    def staleness(self) -> np.ndarray:
        """Updates between the weights that a gradient was taken at and those it is applied to; as `forward`."""
        return np.arange(self.forward.shape[1]) // self.every - self.forward

    def live_after(self, rank: int, stage: int) -> dict[int, int]:
        """How many versions are alive after each last backward, by micro-batch in order; -1 is the start."""
        mine = [life for life in self.lives if (life.rank, life.stage) == (rank, stage)]
        born, dies = np.sort([life.born for life in mine]), np.sort([life.dies for life in mine])
        moments = np.union1d(born, dies)
        live = np.searchsorted(born, moments, "right") - np.searchsorted(dies, moments, "right")
        return dict(zip(moments.tolist(), live.tolist(), strict=True))

    def peak(self, rank: int, stage: int) -> int:
        """The most versions of a stage that are alive on a rank; 0 if it does not hold the stage."""
        return max(self.live_after(rank, stage).values(), default=0)


def versions(schedule: Schedule, policy: WeightPolicy = "stash", every: int = 1) -> Versions:
    """The versions that a schedule without flush uses, from its orders alone.

    policy: "stash": F takes the newest version of its stage, the backward the same one (Narayanan et al. 2019,
        PipeDream, sec. 3.3). "vertical": all stages take the version that the first took (the same, vertical sync).
        "2bw": a micro-batch of update t takes version t - 1, so that two are enough (Narayanan et al. 2021,
        Memory-Efficient Pipeline-Parallel DNN Training, sec. 3.1). "none": F takes the newest when it starts, and I the
        newest when it starts, so that the gradient belongs to neither.
    every: micro-batches per update.

    Start-up versions are clamped at 0. Raises VersionError when policy, `every` and schedule do not fit each other;
    whether each version is there in time is the verifier's question.
    """
    _check(schedule, policy, every)
    newest, newest_backward = _newest(schedule, every)
    microbatches = np.arange(schedule.num_microbatches)
    forward = {
        "stash": newest,
        "vertical": np.broadcast_to(newest[0], newest.shape),
        "2bw": np.broadcast_to(np.maximum(microbatches // every - 1, 0), newest.shape),
        "none": newest,
    }[policy]
    backward = newest_backward if policy == "none" else forward
    lives = tuple(_lives(schedule, every, forward, backward))
    return Versions(policy, every, forward, backward, newest, lives)


def last_shares(schedule: Schedule, rank: int, stage: int, every: int) -> list[int]:
    """By update, the last micro-batch that passes a stage on that rank: its backward completes the rank's share."""
    own = _own(schedule, rank, stage)
    return own[np.append(np.diff(own // every) > 0, True)].tolist()


def with_versions(trace: Trace, schedule: Schedule, plan: Versions) -> Trace:
    """`trace`, of a run of `schedule`, with a counter "live versions of stage s" for each stage of each rank."""
    return replace(trace, counters=(*trace.counters, *_counters(trace, schedule, plan)))


def _check(schedule: Schedule, policy: WeightPolicy, every: int) -> None:
    m, ranks = schedule.num_microbatches, schedule.num_ranks
    if policy not in WEIGHT_POLICIES:
        raise VersionError(f"weights = {policy!r} is no weight policy: use one of {', '.join(WEIGHT_POLICIES)}")
    if schedule.flush:
        raise VersionError(
            f"weights = {policy!r} is for schedules that update within a step, and {schedule.name} flushes: "
            "use pipedream, or leave weights out"
        )
    if not isinstance(every, int) or every < 1 or m % every:
        raise VersionError(
            f"updates_every = {every!r} does not divide the {m} micro-batches of {schedule.name} into updates: "
            f"use {_divisor(m, every)}"
        )
    if policy == "2bw" and every < ranks:
        raise VersionError(
            f"2bw needs at least as many micro-batches per update as ranks: got updates_every = {every} with "
            f"{ranks} ranks. Use {ranks}, or the policy stash"
        )
    for stage, holders in enumerate(zip(*schedule.routes, strict=True)):
        if every % (copies := len(set(holders))):
            raise VersionError(
                f"updates_every = {every} gives the {copies} copies of stage {stage} unequal shares of an update: "
                f"use a multiple of {copies}"
            )
        for rank in set(holders):
            shares = np.bincount(_own(schedule, rank, stage) // every, minlength=m // every)
            if (shares != every // copies).any():
                raise VersionError(
                    f"{schedule.name} gives rank {rank} {shares[shares != every // copies][0]} of the {every} "
                    f"micro-batches of an update of stage {stage}, which {copies} ranks hold: let them take "
                    "micro-batches in turn, as pipedream does"
                )


def _divisor(m: int, near: object) -> int:
    wanted = near if isinstance(near, int) else 1
    return min((d for d in range(1, m + 1) if m % d == 0), key=lambda d: abs(d - wanted))


def _newest(schedule: Schedule, every: int) -> tuple[np.ndarray, np.ndarray]:
    """The newest version when each F, and when each I or B, starts; shape (stages, micro-batches) both."""
    shape = schedule.num_stages, schedule.num_microbatches
    at_forward, at_backward = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for rank, order in enumerate(schedule.orders):
        stages, ops, microbatches = order.rows.T
        closes = (ops == Op.W) | (ops == Op.B)
        for stage in {stage for _, stage in schedule.stages_on(rank)}:
            here = stages == stage
            ended = np.cumsum(here & closes) - (here & closes)
            ended[order.joined + 1] = ended[order.joined]  # both parts of an Overlap start together
            # The update of the first own micro-batch that has not ended is the first that is still to come.
            own = _own(schedule, rank, stage)
            coming = np.append(own, schedule.num_microbatches) // every
            for found, rows in (
                (at_forward, here & (ops == Op.F)),
                (at_backward, here & ((ops == Op.I) | (ops == Op.B))),
            ):
                found[stage, microbatches[rows]] = coming[ended[rows]]
    return at_forward, at_backward


def _own(schedule: Schedule, rank: int, stage: int) -> np.ndarray:
    """The micro-batches that pass a stage on a rank, ascending."""
    visits = np.array([route[stage] == rank for route in schedule.routes])
    return np.flatnonzero(visits[np.array(schedule.route_of)])


def _lives(schedule: Schedule, every: int, forward: np.ndarray, backward: np.ndarray) -> Iterator[Life]:
    for rank in range(schedule.num_ranks):
        for stage in sorted({stage for _, stage in schedule.stages_on(rank)}):
            own = _own(schedule, rank, stage)
            last: dict[int, int] = {}
            for i in own.tolist():
                last[int(forward[stage, i])] = last[int(backward[stage, i])] = i
            for version in sorted(last):
                before = own[own < version * every]
                born = int(before[-1]) if len(before) else -1
                yield Life(rank, stage, version, born, last[version])


def _counters(trace: Trace, schedule: Schedule, plan: Versions) -> Iterator[Counter]:
    begin = float(trace.start.min(initial=np.inf))
    for rank in range(schedule.num_ranks):
        spans = trace.on(rank, COMPUTE)
        closes = (spans.op == Op.W) | (spans.op == Op.B)
        for stage in sorted({stage for _, stage in schedule.stages_on(rank)}):
            ends = dict(
                zip(*(c[closes & (spans.stage == stage)].tolist() for c in (spans.microbatch, spans.end)), strict=True)
            )
            live = plan.live_after(rank, stage)
            times = [begin if i < 0 else ends[i] for i in live]
            yield Counter(counter_name(stage), rank, np.array(times), np.array(list(live.values())))


def counter_name(stage: int) -> str:
    return f"live versions of stage {stage}"
