"""Dispatch: orders from running, at every moment, the pass that is most overdue in a steady state aimed at.

With several chunks per rank there is no one way to interleave them; this finds some, for any placement and any costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeswift.ir import Action, Op, Order, Schedule
from pipeswift.policy import Decision, Policy, Ready, View
from pipeswift.search.bound import round_trip
from pipeswift.search.candidates import one_at_a_time
from pipeswift.search.problem import Problem
from pipeswift.simulate import run

STRETCHES = (1.0, 0.85, 0.7, 0.5)  # of the slowest pace at which memory suffices
SLOWEST = 2.0  # times as long as passes and links take, where memory would allow more
MOST_PASSES = 20_000  # beyond which the event loop takes too long


class MostOverdue(Policy):
    """A policy: of the forwards and input gradients that are ready the one due first, else a weight gradient."""

    def __init__(self, due: np.ndarray, period: float):
        self._due = due.tolist()
        self._period = period

    def next(self, ready: Ready, view: View) -> Decision:
        split = (action for action in ready if action.op is not Op.B)
        return Decision(min(split, key=self._key, default=None))

    def _key(self, action: Action) -> tuple[bool, float, int]:
        stage, op, microbatch = action
        late = op is Op.W
        return late, microbatch if late else self._due[op][stage] + microbatch * self._period, stage


def dispatched(problem: Problem) -> Iterator[Schedule]:
    """Schedules for several paces, each different; none where it would take too long."""
    if 3 * problem.stages * problem.microbatches > MOST_PASSES:
        return
    period = float(problem.work.max()) / problem.microbatches
    seen, places = set(), one_at_a_time(problem)
    for stretch in STRETCHES:
        pace = max(min(_slowest(problem, period), SLOWEST), 0.0) * stretch
        slots = _slots(problem, pace, period)
        trace = run(places, problem.costs, MostOverdue(_due(problem, pace), period), slots)
        rows = [np.stack([one.stage, one.op, one.microbatch], axis=1) for one in trace.by_rank()]
        schedule = replace(problem.empty, orders=tuple(map(Order, rows)), name="dispatch")
        if schedule.fingerprint not in seen:
            seen.add(schedule.fingerprint)
            yield schedule


def _due(problem: Problem, pace: float) -> np.ndarray:
    """When F and I of micro-batch 0 are due on each stage, shape (2, stages)."""
    lasts = problem.seconds[:2].mean(axis=2) * pace
    delay = problem.delay * pace
    there = np.concatenate([[0.0], np.cumsum(lasts[0, :-1] + delay[0, :-1])])
    back = np.concatenate([[0.0], np.cumsum((lasts[1, 1:] + delay[1, 1:])[::-1])])[::-1]
    return np.stack([there, there[-1] + lasts[0, -1] + back])


def _lives(problem: Problem) -> np.ndarray:
    """Seconds from the start of F to the end of W of each stage, if nothing waits, shape (stages,)."""
    own = problem.seconds[: Op.B].mean(axis=2).sum(axis=0)
    return own + np.array([round_trip(problem, stage, stage) for stage in range(problem.stages)])


def _slowest(problem: Problem, period: float) -> float:
    """The pace at which what a rank holds on average is its limit (by Little's law)."""
    holds = np.bincount(problem.rank_of, problem.memory[Op.F] * _lives(problem), problem.ranks) / period
    return float(problem.limit / holds.max()) if holds.max() > 0 else np.inf


def _slots(problem: Problem, pace: float, period: float) -> dict[tuple[int, int], int]:
    """Micro-batches that each (stage, route 0) may hold, at least one, so that a rank's stages keep the limit."""
    slots = np.clip(np.ceil(_lives(problem) * pace / period).astype(int) + 1, 1, problem.microbatches)
    for rank in range(problem.ranks):
        held = np.flatnonzero(problem.rank_of == rank)
        sizes = problem.memory[Op.F, held]
        while slots[held] @ sizes > problem.slack_limit and (slots[held] > 1).any():
            slots[held[np.argmax(slots[held])]] -= 1
    return {(stage, 0): int(count) for stage, count in enumerate(slots)}
