"""What a replay looks up: the dependency relation, and the link that each pass's product takes, as arrays."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import MAKES, NEEDS, Action, Op, Product, Schedule

NONE = np.uint64(2**64 - 1)  # "no such thing", in arrays of indices
PRODUCTS = 1 + max(product for need in NEEDS for product, _ in need)  # those that some pass needs come first


class CostsMismatch(PipeSwiftError):
    """Costs made for another schedule: their shapes or values do not fit this one."""


def unmeasured(action: Action) -> CostsMismatch:
    """The error of a pass that costs read off a trace have no seconds for."""
    return CostsMismatch(
        f"costs.seconds has no number for {action}: measured costs only fit schedules made of passes that ran."
    )


class Dependencies(NamedTuple):
    """`ir.MAKES` and `ir.NEEDS` for one size of schedule, as positions in an array (products, stages, microbatches).

    Each entry is the position of micro-batch 0, so that adding a micro-batch gives its own; NONE where there is none.
    makes: uint64, shape (ops, stages). needs: uint64, shape (ops, stages, most needs of an op).
    elsewhere: bool, shape (ops, most needs): whether another stage makes it.
    """

    makes: np.ndarray
    needs: np.ndarray
    elsewhere: np.ndarray


class Links(NamedTuple):
    """How the product of a pass travels to the one other stage that needs it; arrays of shape (routes, ops, stages).

    receiver: uint64, the rank it is sent to, NONE if it stays on its own. transfer: seconds of bytes over bandwidth.
    latency: seconds on top. channel: uint64, which serial channel `transfer` occupies, NONE if it occupies nothing.
    """

    receiver: np.ndarray
    transfer: np.ndarray
    latency: np.ndarray
    channel: np.ndarray


@cache
def product_of(op: Op) -> Product | None:
    """What an op makes that some pass needs: at most one product, so a pass sends at most one message."""
    made = [product for product in MAKES[op] if any(product is needed for need in NEEDS for needed, _ in need)]
    if not made:
        return None
    (product,) = made
    return product


@cache
def _user_of(product: Product) -> int:
    """Where the other stage that needs `product` lies, relative to the one that makes it."""
    (offset,) = {-offset for need in NEEDS for needed, offset in need if needed is product and offset}
    return offset


def dependencies(stages: int, microbatches: int) -> Dependencies:
    """The dependency relation of a schedule of that size."""
    most = max(map(len, NEEDS))
    makes = np.full((len(Op), stages), NONE)
    needs = np.full((len(Op), stages, most), NONE)
    elsewhere = np.zeros((len(Op), most), dtype=np.bool_)
    stage = np.arange(stages)
    for op in Op:
        if (product := product_of(op)) is not None:
            makes[op] = (product * stages + stage) * microbatches
        for k, (product, offset) in enumerate(NEEDS[op]):
            source = stage + offset
            there = (source >= 0) & (source < stages)
            needs[op, there, k] = (product * stages + source[there]) * microbatches
            elsewhere[op, k] = offset != 0
    return Dependencies(makes, needs, elsewhere)


def links(schedule: Schedule, costs: Costs) -> Links:
    """The links of `schedule` under `costs`. Raises CostsMismatch where the two do not fit."""
    _check(schedule, costs)
    shape = (len(schedule.routes), len(Op), schedule.num_stages)
    table = Links(np.full(shape, NONE), np.zeros(shape), np.zeros(shape), np.full(shape, NONE))
    ranks = schedule.num_ranks
    latency = np.broadcast_to(costs.latency, (ranks, ranks))
    transfer = costs.boundary_bytes / costs.bandwidth
    for op in Op:
        if (product := product_of(op)) is None:
            continue
        step = _user_of(product)
        stage = np.arange(max(-step, 0), schedule.num_stages - max(step, 0))
        for route, rank_of in enumerate(np.array(schedule.routes)):
            source, target = rank_of[stage], rank_of[stage + step]
            sent = source != target
            at = route, op, stage[sent]
            source, target = source[sent], target[sent]
            table.receiver[at] = target
            table.transfer[at] = transfer[np.minimum(stage, stage + step)[sent]]
            table.latency[at] = latency[source, target]
            if costs.serial_channels:
                table.channel[at] = source * ranks + target
    return table


def _check(schedule: Schedule, costs: Costs) -> None:
    name, p = schedule.name, schedule.num_ranks
    stages, m = schedule.num_stages, schedule.num_microbatches
    shapes = {
        "seconds": [(len(Op), stages, 1), (len(Op), stages, m)],
        "boundary_bytes": [(stages - 1,)],
        "latency": [(), (p, p)],
        "overlap": [(), (stages, stages)],
    }
    for field, allowed in shapes.items():
        shape = np.shape(getattr(costs, field))
        if shape not in allowed:
            raise CostsMismatch(
                f"costs.{field} has shape {shape}, but schedule {name} has {p} ranks, {stages} stages and "
                f"{m} micro-batches: give shape {' or '.join(map(str, dict.fromkeys(allowed)))}."
            )
    if (costs.seconds < 0).any() or np.min(costs.latency) < 0:
        raise CostsMismatch("costs hold a negative time: seconds and latency are at least 0.")
    if not costs.bandwidth > 0:
        raise CostsMismatch(f"costs.bandwidth is {costs.bandwidth}: give bytes per second above 0, or inf.")
