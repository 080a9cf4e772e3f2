"""Replan: between steps, the order that is best for what passes have lately cost; within a step, no decision at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op, Schedule
from pipeswift.policy.hint import check_hint
from pipeswift.policy.ready import slots_of

DRIFT = 0.05  # of a stage's seconds, or of a layer's rows, from which on a plan is out of date
LONGEST_REST = 16  # steps
WINDOW = 3  # steps whose mean is planned for, since one step may have been disturbed


class Seen(NamedTuple):
    """What a step has shown, the same on all ranks.

    seconds: the mean of each (op, stage), shape (4, stages), NaN where none ran.
    loads: rows by expert, for each layer that has experts.
    """

    seconds: np.ndarray
    loads: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Plan:
    """The order that all ranks follow. basis: what it was made for; None for the schedule's own order.

    steps: the latest ones. made: how many plans there have been. rest: in how many more steps it lasts, drift or not;
    twice as many after each plan that came to the same order, since times that drift to no effect are noise. last_rest:
    what it was at first.
    """

    order: Schedule
    basis: Seen | None = None
    steps: tuple[Seen, ...] = ()
    made: int = 0
    rest: int = 0
    last_rest: int = 0

    def after(self, seen: Seen, find: Callable[[np.ndarray], Schedule]) -> Plan:
        """The plan for the next step: this one, until what it was made for has drifted.

        find: from `Seen.seconds` to the order. Rows that have moved between experts make the times of earlier steps
        worthless at once. Pure: as long as `find` is, ranks that have seen the same have the same plan.
        """
        stale = bool(self.steps) and moved(seen.loads, self.steps[-1].loads) > DRIFT
        steps = (seen,) if stale else (*self.steps, seen)[-WINDOW:]
        lately = _together(steps)
        if self.rest or (self.basis is not None and drift(lately, self.basis) <= DRIFT):
            return replace(self, steps=steps, rest=max(self.rest - 1, 0))
        order = find(lately.seconds)
        rest = min(2 * self.last_rest or 1, LONGEST_REST) if order is self.order and self.made else 0
        return Plan(order, lately, steps, self.made + 1, rest, rest)


def drift(now: Seen, then: Seen) -> float:
    """The largest relative change of a stage's seconds per micro-batch, or the share of rows that moved, if larger."""
    before, after = (np.nansum(seen.seconds, axis=0) for seen in (then, now))
    change = np.abs(after - before) / np.where(before > 0.0, before, np.inf)
    return max(float(change.max(initial=0.0)), moved(now.loads, then.loads))


def moved(now: Mapping[str, np.ndarray], then: Mapping[str, np.ndarray]) -> float:
    """The share of a layer's rows that go to other experts than before, of the layer where it is largest."""
    return max((_moved(rows, then[layer]) for layer, rows in now.items() if layer in then), default=0.0)


def _moved(now: np.ndarray, then: np.ndarray) -> float:
    after, before = (rows / max(rows.sum(), 1) for rows in (now, then))
    return float(np.maximum(after - before, 0.0).sum())


def _together(steps: Sequence[Seen]) -> Seen:
    seconds = np.mean([step.seconds for step in steps], axis=0)
    return Seen(seconds, {layer: np.sum([step.loads[layer] for step in steps], axis=0) for layer in steps[-1].loads})


def check_replan(schedule: Schedule, in_flight: int | None = None) -> None:
    """Raises PipeSwiftError for a schedule that cannot be planned anew, or that holds more than `in_flight` itself."""
    check_hint("replan", schedule)
    held = np.bincount(schedule.routes[0], minlength=schedule.num_ranks)
    if len(set(held.tolist())) > 1:
        raise PipeSwiftError(
            f"policy replan needs as many stages on every rank: {schedule.name} has {' '.join(map(str, held))} by "
            "rank. Use policy follow or swift, or another placement."
        )
    ops = {op for order in schedule.orders for op in order.rows[:, 1].tolist()}
    if {Op.I, Op.B} <= ops:
        raise PipeSwiftError(
            f"policy replan keeps backwards whole or split, and {schedule.name} has both: use policy follow or swift, "
            "or split all of them (pipeswift.passes.split_backward)."
        )
    most = max(slots_of(schedule).values())
    if in_flight is not None and in_flight < most:
        raise PipeSwiftError(
            f"in_flight = {in_flight} is less than the {most} micro-batches that some stage holds in the order of "
            f"{schedule.name}, from which policy replan starts: use {most} or more, or leave it out"
        )
