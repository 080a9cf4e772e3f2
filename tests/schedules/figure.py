"""Schedules drawn as the papers draw them: one column per unit of time, one row per rank."""

from __future__ import annotations

from typing import Literal

from pipeswift.ir import Action, Op, Schedule
from pipeswift.schedules import Times

Spans = dict[Action, tuple[float, float]]


def timeline(schedule: Schedule, F: float = 1, B: float = 1, I: float = 1, W: float = 1) -> Spans:  # noqa: E741
    """(start, end) of every action of a one-route schedule, as soon as possible, free communication."""
    seconds = {Op.F: F, Op.I: I, Op.W: W, Op.B: B}
    times: Spans = {}
    queues = [list(order.actions())[::-1] for order in schedule.orders]
    clock = [0.0] * schedule.num_ranks
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(need in times for need in _before(queue[-1], schedule.num_stages)):
                action = queue.pop()
                needs = (times[need][1] for need in _before(action, schedule.num_stages))
                start = max([clock[rank], *needs])
                clock[rank] = start + seconds[action.op]
                times[action] = start, clock[rank]
    return times


def _before(action: Action, stages: int) -> list[Action]:
    stage, op, i = action
    if op is Op.F:
        return [Action(stage - 1, Op.F, i)] if stage else []
    if op is Op.W:
        return [Action(stage, Op.I, i)]
    return [Action(stage, Op.F, i)] + ([Action(stage + 1, op, i)] if stage + 1 < stages else [])


def draw(schedule: Schedule) -> str:
    """The timeline with every pass of length 1; chunks after the first in small letters."""
    times = timeline(schedule)
    width = int(max(end for _, end in times.values()))
    lines = []
    for rank, order in enumerate(schedule.orders):
        cells = [".."] * width
        for action in order.actions():
            letter = "FIWB"[action.op] if action.stage < schedule.num_ranks else "fiwb"[action.op]
            cells[int(times[action][0])] = f"{letter}{action.microbatch}"
        lines.append(f"rank {rank}  {' '.join(cells)}")
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
