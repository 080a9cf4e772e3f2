"""Who decides in a simulation: the schedule's own order, or policy swift with that order as its hint."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from math import floor
from typing import Annotated

import typer

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.policy import Slots, Swift, calibrate, slots_of
from pipeswift.simulate import replay, run
from pipeswift.trace import Trace


class Choice(StrEnum):
    follow = "follow"
    swift = "swift"


Policy = Annotated[
    Choice,
    typer.Option("--policy", help="follow: the schedule's order, whatever comes. swift: leave it when times swing."),
]


def clock(
    schedule: Schedule, choice: Choice, limit: float | None, calibration: Costs, every: int | None
) -> Callable[[Costs], Trace]:
    """The timeline of a step as a function of what its passes cost; monitors start anew with each.

    limit: under swift, micro-batches in flight per stage; by default what the schedule's own order needs.
    calibration: what passes cost in the static run from which swift knows how they usually swing.
    every: micro-batches per update, without flush; ranks that hold one stage then wait for each other.
    Raises PipeSwiftError when swift cannot have this schedule, or not within this limit.
    """
    if choice is Choice.follow and every is not None and len(schedule.routes) > 1:
        return partial(run, schedule, updates_every=every)
    if choice is Choice.follow:
        return partial(replay, schedule)
    slots = _slots(schedule, limit)
    policy = Swift(schedule, slots, calibration=calibrate(replay(schedule, calibration)))
    return lambda costs: run(schedule, costs, policy, slots)


def _slots(schedule: Schedule, limit: float | None) -> Slots:
    needed = slots_of(schedule)
    if limit is None:
        return needed
    # A chunk's share of the memory, times the chunks of a rank, is 1 again.
    if (slots := floor(limit + 1e-9)) < 1:
        raise PipeSwiftError(
            f"policy swift needs a slot per stage, and --memory-limit {limit:g} leaves none. Use 1 or more."
        )
    return dict.fromkeys(needed, slots)
