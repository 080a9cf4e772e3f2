"""Replay: the timeline of a schedule's own order, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action, Op, Schedule, needs, parts
from pipeswift.simulate.deadlock import Deadlock, Stuck, misses
from pipeswift.simulate.tables import PRODUCTS, dependencies, links, unmeasured
from pipeswift.trace import COMPUTE, Trace

if TYPE_CHECKING:
    from pipeswift.simulate.kernel import Work


def replay(schedule: Schedule, costs: Costs) -> Trace:
    """When every action of `schedule` runs, each rank keeping to its own order; seconds, from 0.

    An entry starts when its rank is free and what it needs is there. A product made on another rank is there
    `costs.latency` plus bytes over bandwidth later; with `costs.serial_channels` the messages from one rank to another
    queue in the order they were made, each holding the channel for bytes over bandwidth. The parts of an Overlap run
    one after the other, or, with `costs.overlap`, both for that long.

    Spans are grouped by rank. The first call in a process loads Numba (and compiles, once per machine).
    Raises Deadlock when the order cannot finish, CostsMismatch when the costs are for another schedule. Whether a
    schedule is complete is the verifier's question, not asked here.
    """
    from pipeswift.simulate.kernel import play

    work = prepare(schedule, costs)
    reached = play(*work)
    lengths = [len(order.rows) for order in schedule.orders]
    done = reached - work.orders.offsets[:-1]
    if not np.array_equal(done, lengths):
        arrival = work.arrival.reshape(-1, schedule.num_stages, schedule.num_microbatches)
        raise Deadlock(schedule.name, schedule.num_ranks, list(_stuck(schedule, done.tolist(), arrival)))
    return timeline(schedule, work.orders.rows.view(np.int32), lengths, work.start, work.end)


def prepare(schedule: Schedule, costs: Costs) -> Work:
    """The arguments of `kernel.play`, checked. Raises as `replay` does."""
    from pipeswift.simulate.kernel import Orders, Work

    ways = links(schedule, costs)
    _check_places(schedule)
    rows = np.concatenate([order.rows for order in schedule.orders])
    _check_seconds(rows, costs)
    offsets = np.cumsum([0, *(len(order.rows) for order in schedule.orders)])
    joined = np.zeros(len(rows), dtype=np.bool_)
    for offset, order in zip(offsets[:-1], schedule.orders, strict=True):
        joined[offset + order.joined] = True
    stages, m = schedule.num_stages, schedule.num_microbatches
    return Work(
        Orders(rows.view(np.uint32), joined, offsets.astype(np.uint64), np.array(schedule.route_of, dtype=np.uint32)),
        dependencies(stages, m),
        ways,
        np.ascontiguousarray(costs.seconds, dtype=np.float64),
        costs.pairs,
        arrival=np.full(PRODUCTS * stages * m, np.nan),
        start=np.empty(len(rows)),
        end=np.empty(len(rows)),
    )


def timeline(schedule: Schedule, rows: np.ndarray, lengths: list[int], start: np.ndarray, end: np.ndarray) -> Trace:
    """The Trace of rows (stage, op, microbatch) grouped by rank, `lengths[r]` on rank r; shares their memory."""
    return Trace(
        num_ranks=schedule.num_ranks,
        rank=np.repeat(np.arange(schedule.num_ranks, dtype=np.int32), lengths),
        stage=rows[:, 0],
        op=rows[:, 1],
        microbatch=rows[:, 2],
        start=start,
        end=end,
        lane=np.broadcast_to(np.int32(COMPUTE), len(rows)),
        name=schedule.name,
    )


def _check_places(schedule: Schedule) -> None:
    """The kernel trusts every row: its numbers exist, and its stage is on the rank that the routes name."""
    routes, route_of = np.array(schedule.routes), np.array(schedule.route_of)
    limit = np.array([schedule.num_stages, len(Op), schedule.num_microbatches])
    for rank, order in enumerate(schedule.orders):
        if not len(order.rows):
            continue
        if order.rows.min() < 0 or (order.rows.max(axis=0) >= limit).any():
            row = np.argmax(((order.rows < 0) | (order.rows >= limit)).any(axis=1))
            stage, op, microbatch = order.rows[row]
            raise PipeSwiftError(
                f"schedule {schedule.name}, rank {rank}, action {row}: no stage {stage}, op {op}, micro-batch "
                f"{microbatch} among its {limit[0]} stages, {limit[1]} ops and {limit[2]} micro-batches."
            )
        holder = routes[route_of[order.rows[:, 2]], order.rows[:, 0]]
        if (holder != rank).any():
            row = int(np.argmax(holder != rank))
            stage, op, microbatch = order.rows[row].tolist()
            raise PipeSwiftError(
                f"schedule {schedule.name}, rank {rank}: {Action(stage, Op(op), microbatch)} does not belong there, "
                f"its routes hold stage {stage} on rank {holder[row]}."
            )


def _check_seconds(rows: np.ndarray, costs: Costs) -> None:
    """Measured costs are NaN where nothing ran."""
    if not np.isnan(costs.seconds).any():
        return
    stage, op, microbatch = rows.T
    unknown = np.isnan(costs.seconds[op, stage, microbatch % costs.seconds.shape[2]])
    if unknown.any():
        stage, op, microbatch = rows[np.argmax(unknown)].tolist()
        raise unmeasured(Action(stage, Op(op), microbatch))


def _stuck(schedule: Schedule, done: list[int], arrival: np.ndarray) -> Iterator[Stuck]:
    """The ranks with rows left after `done[rank]` rows, each with its next entry and what that misses."""
    for rank, order in enumerate(schedule.orders):
        if done[rank] < len(order.rows):
            entry = order[done[rank] - int(np.searchsorted(order.joined, done[rank]))]
            reasons = (
                misses(schedule, product, stage, action.microbatch)
                for action in parts(entry)
                for product, stage in needs(action, schedule.num_stages)
                if np.isnan(arrival[product, stage, action.microbatch])
            )
            yield Stuck(rank, entry, tuple(reasons))
