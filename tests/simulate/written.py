"""Schedules written out by hand, and traces read back as text."""

from __future__ import annotations

from pipeswift.codec import parse_entry
from pipeswift.ir import Action, Op, Order, Schedule, loop
from pipeswift.trace import Trace


def written(*orders: str, stages: int | None = None, microbatches: int | None = None, routes=None) -> Schedule:
    """One line per rank, such as "0F0 0F1 (0F2;0B0)OVERLAP_F_B"; stages are placed round and round unless routed."""
    entries = [Order.of(parse_entry(cell, "here") for cell in line.split()) for line in orders]
    actions = [action for order in entries for action in order.actions()]
    stages = max(action.stage for action in actions) + 1 if stages is None else stages
    microbatches = max(action.microbatch for action in actions) + 1 if microbatches is None else microbatches
    one = (tuple(loop(stage, len(orders)) for stage in range(stages)),)
    routes = one if routes is None else routes
    return Schedule(
        orders=tuple(entries),
        routes=routes,
        route_of=tuple(i % len(routes) for i in range(microbatches)),
        name="written",
    )


def starts(trace: Trace) -> dict[str, float]:
    """When each action started."""
    return {name: float(time) for name, time in zip(_names(trace), trace.start, strict=True)}


def ends(trace: Trace) -> dict[str, float]:
    """When each action ended."""
    return {name: float(time) for name, time in zip(_names(trace), trace.end, strict=True)}


def _names(trace: Trace) -> list[str]:
    rows = zip(trace.stage.tolist(), trace.op.tolist(), trace.microbatch.tolist(), strict=True)
    return [str(Action(stage, Op(op), microbatch)) for stage, op, microbatch in rows]
