"""Schedules drawn as the papers draw them: one column per unit of time, one row per rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pipeswift.ir import Action, Op, Overlap, Schedule, parts
from pipeswift.schedules import Times

Spans = dict[Action, tuple[float, float]]


def timeline(schedule: Schedule, F: float = 1, B: float = 1, I: float = 1, W: float = 1) -> Spans:  # noqa: E741
    """(start, end) of every action, as soon as possible, free communication; the parts of an Overlap in turn."""
    seconds = {Op.F: F, Op.I: I, Op.W: W, Op.B: B}
    times: Spans = {}
    queues = [list(order)[::-1] for order in schedule.orders]
    clock = [0.0] * schedule.num_ranks
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and None not in (ends := [_end(times, need) for need in _before(queue[-1], schedule)]):
                clock[rank] = max([clock[rank], *(end for end in ends if end is not None)])
                for action in parts(queue.pop()):
                    start, clock[rank] = clock[rank], clock[rank] + seconds[action.op]
                    times[action] = start, clock[rank]
    return times


def _before(entry: Action | Overlap, schedule: Schedule) -> Iterator[tuple[Action, ...]]:
    """What has to end before it starts, each need as the actions that would do."""
    for stage, op, i in parts(entry):
        if op is Op.W:
            yield (Action(stage, Op.I, i),)
        elif op is not Op.F:
            yield (Action(stage, Op.F, i),)
            if stage + 1 < schedule.num_stages:
                yield Action(stage + 1, Op.B, i), Action(stage + 1, Op.I, i)
        elif stage:
            yield (Action(stage - 1, Op.F, i),)


def _end(times: Spans, need: tuple[Action, ...]) -> float | None:
    return next((times[action][1] for action in need if action in times), None)


def draw(schedule: Schedule) -> str:
    """The timeline with every pass of length 1; later chunks, and the second route, in small letters."""
    times = timeline(schedule)
    width = int(max(end for _, end in times.values()))
    lines = []
    for rank, order in enumerate(schedule.orders):
        cells = [".. "] * width
        for entry in order:
            for action in parts(entry):
                first = action.stage < schedule.num_ranks and schedule.route_of[action.microbatch] == 0
                after = "&" if isinstance(entry, Overlap) and action is entry.first else " "
                letter = ("FIWB" if first else "fiwb")[action.op]
                cells[int(times[action][0])] = f"{letter}{action.microbatch}{after}"
        lines.append(f"rank {rank}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def figure_of(docstring: str | None) -> str:
    """The figure inside a docstring."""
    lines = (line.strip() for line in (docstring or "").splitlines())
    return "\n".join(line for line in lines if line.startswith("rank "))


def idle(schedule: Schedule, seconds: Times, by: Literal["makespan", "span"] = "makespan") -> list[float]:
    """Seconds that each rank idles within the makespan, or between its own first start and last end.

    seconds: of one pass of one stage.
    """
    times = timeline(schedule, F=seconds.F, B=seconds.B, I=seconds.I, W=seconds.W)
    last = max(end for _, end in times.values())
    idle = []
    for order in schedule.orders:
        spans = [times[action] for action in order.actions()]
        cost = last if by == "makespan" else max(end for _, end in spans) - min(start for start, _ in spans)
        idle.append(cost - sum(end - start for start, end in spans))
    return idle
