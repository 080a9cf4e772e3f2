"""Schedules drawn as the papers draw them: one column per unit of time, one row per rank."""

from __future__ import annotations

from pipeswift.ir import Action, Op, Schedule


def timeline(schedule: Schedule, F: float = 1, B: float = 1) -> dict[Action, tuple[float, float]]:
    """(start, end) of every action of a one-route schedule of F and B, as soon as possible, free communication."""
    seconds = {Op.F: F, Op.B: B}
    times: dict[Action, tuple[float, float]] = {}
    queues = [list(order.actions()) for order in schedule.orders]
    clock = [0.0] * schedule.num_ranks
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(need in times for need in _before(queue[0], schedule.num_stages)):
                action = queue.pop(0)
                needs = (times[need][1] for need in _before(action, schedule.num_stages))
                start = max([clock[rank], *needs])
                clock[rank] = start + seconds[action.op]
                times[action] = start, clock[rank]
    return times


def _before(action: Action, stages: int) -> list[Action]:
    stage, op, i = action
    if op is Op.F:
        return [Action(stage - 1, Op.F, i)] if stage else []
    return [Action(stage, Op.F, i)] + ([Action(stage + 1, Op.B, i)] if stage + 1 < stages else [])


def draw(schedule: Schedule) -> str:
    """The timeline with F = B = 1; chunks after the first in small letters."""
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


def idle(schedule: Schedule, F: float, B: float) -> list[float]:
    """Seconds that each rank idles within the makespan."""
    times = timeline(schedule, F, B)
    makespan = max(end for _, end in times.values())
    return [makespan - sum(times[a][1] - times[a][0] for a in order.actions()) for order in schedule.orders]
