"""What can be seen in the orders alone: where each action runs, how often, in which order, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsInt

import numpy as np

from pipeswift.ir import MAKES, Action, Op, Product, Schedule
from pipeswift.passes import Rows
from pipeswift.verify.violation import Violation

#: For each product, the ops that make it: they keep micro-batch order together.
_MAKERS = tuple([op for op in Op if product in MAKES[op]] for product in Product)


def shape(schedule: Schedule) -> Iterator[Violation]:
    """Orders, routes and micro-batches have to fit each other."""
    ranks, routes = schedule.num_ranks, schedule.routes
    if not ranks:
        yield Violation(0, None, "shape", "there is no rank: a schedule needs at least one order")
    if not routes or not all(routes) or len({len(route) for route in routes}) > 1:
        yield Violation(0, None, "shape", f"every route needs the same number of stages, at least one: got {routes}")
    for k, route in enumerate(routes):
        for stage, rank in enumerate(route):
            if not 0 <= rank < ranks:
                text = f"route {k} puts stage {stage} on rank {rank}, and there are orders for {ranks} ranks"
                yield Violation(rank, None, "shape", text)
    if not schedule.route_of:
        yield Violation(0, None, "shape", "there is no micro-batch: a schedule needs at least one")
    for microbatch, k in enumerate(schedule.route_of):
        if not 0 <= k < len(routes):
            text = f"micro-batch {microbatch} takes route {k}, and there are {len(routes)} routes, counted from 0"
            yield Violation(0, None, "shape", text)


def exists(schedule: Schedule, rows: Rows) -> np.ndarray:
    """For each row, whether its op, stage and micro-batch are in range; bool, shape (actions,)."""
    return (
        _within(rows.op, len(Op))
        & _within(rows.stage, schedule.num_stages)
        & _within(rows.microbatch, schedule.num_microbatches)
    )


def homes(schedule: Schedule, rows: Rows) -> np.ndarray:
    """For each row, the rank that its route gives it; rows out of range excluded by the caller."""
    return np.array(schedule.routes)[np.array(schedule.route_of)[rows.microbatch], rows.stage]


def placement(schedule: Schedule, rows: Rows) -> Iterator[Violation]:
    """Every action names an op, stage and micro-batch that exist, and runs where its route says."""
    known = exists(schedule, rows)
    for row in np.flatnonzero(~known):
        rank, _, stage, op, microbatch = (int(column[row]) for column in rows)
        action = Action(stage, Op(op), microbatch) if op in set(Op) else None
        text = (
            f"rank {rank} runs {action or f'op {op}'}, and there are stages 0 to {schedule.num_stages - 1} "
            f"and micro-batches 0 to {schedule.num_microbatches - 1}"
        )
        yield Violation(rank, action, "placement", text)
    at = np.flatnonzero(known)
    home = homes(schedule, select(rows, at))
    for row in at[home != rows.rank[at]]:
        rank, action = int(rows.rank[row]), action_at(rows, row)
        owner = schedule.rank_of(action.stage, action.microbatch)
        text = f"rank {rank} runs {action}, and stage {action.stage} of that micro-batch is on rank {owner}"
        yield Violation(rank, action, "placement", text)


def completeness(schedule: Schedule, rows: Rows) -> Iterator[Violation]:
    """Every stage runs every micro-batch forward once and backward once, whole (B) or split (I and W)."""
    shape = (len(Op), schedule.num_stages, schedule.num_microbatches)
    known = select(rows, np.flatnonzero(exists(schedule, rows)))
    flat = np.ravel_multi_index((known.op, known.stage, known.microbatch), shape)
    counts = np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape)
    whole = (counts[Op.B] == 1) & (counts[Op.I] == 0) & (counts[Op.W] == 0)
    split = (counts[Op.B] == 0) & (counts[Op.I] == 1) & (counts[Op.W] == 1)
    for stage, microbatch in np.argwhere(counts[Op.F] != 1).tolist():
        action = Action(stage, Op.F, microbatch)
        yield _miscounted(schedule, action, f"{action} {_runs(counts[action.op, stage, microbatch])}")
    for stage, microbatch in np.argwhere(~(whole | split)).tolist():
        runs = [(Action(stage, op, microbatch), int(counts[op, stage, microbatch])) for op in (Op.B, Op.I, Op.W)]
        present = [(action, count) for action, count in runs if count] or runs[:1]
        said = " and ".join(f"{action} {_runs(count)}" for action, count in present)
        text = f"{said}: a backward is one B, or one I and one W"
        yield _miscounted(schedule, present[0][0], text)


def micro_batch_order(schedule: Schedule, rows: Rows) -> Iterator[Violation]:
    """On each (stage, route), forwards, gradients and weight gradients each go in ascending micro-batch order.

    So every channel carries its micro-batches in ascending order, and gradients add up in one order whatever the
    schedule. The first break of each is reported.
    """
    at = np.flatnonzero(exists(schedule, rows))
    at = at[homes(schedule, select(rows, at)) == rows.rank[at]]
    place = np.array(schedule.route_of)[rows.microbatch[at]] * schedule.num_stages + rows.stage[at]
    pairs: dict[tuple[int, int], None] = {}  # the two rows of each break; two B break two orders
    for makers in _MAKERS:
        makes = np.isin(rows.op[at], makers)
        queue, arranged = place[makes], at[makes]
        by_place = np.argsort(queue, kind="stable")
        queue, arranged = queue[by_place], arranged[by_place]
        microbatch = rows.microbatch[arranged]
        back = np.flatnonzero((queue[1:] == queue[:-1]) & (microbatch[1:] < microbatch[:-1]))
        _, first = np.unique(queue[back], return_index=True)
        pairs |= dict.fromkeys((int(arranged[pair]), int(arranged[pair + 1])) for pair in back[first])
    for pair in pairs:
        early, late = (action_at(rows, row) for row in pair)
        rank = int(rows.rank[pair[0]])
        text = f"rank {rank} runs {late} after {early}: micro-batches of one stage go in ascending order"
        yield Violation(rank, late, "order", text)


def memory(schedule: Schedule, rows: Rows, limit: float) -> Iterator[Violation]:
    """No rank holds more than `limit` activations, in units of one rank's share; the first excess is reported."""
    chunks = schedule.chunks
    for rank, live in enumerate(_live_chunks(schedule)):
        over = np.flatnonzero(live > limit * chunks + 1e-9)
        if len(over):
            action = action_at(rows, int(np.searchsorted(rows.rank, rank)) + int(over[0]))
            text = (
                f"rank {rank} holds {live[over[0]] / chunks:g} activations when {action} starts, "
                f"and the limit is {limit:g}: a limit of {live.max() / chunks:g} would do for this rank"
            )
            yield Violation(rank, action, "memory", text)


def peak_activations(schedule: Schedule) -> np.ndarray:
    """The most activations that each rank holds, float64, shape (ranks,), read off the orders.

    In units of one rank's share of the model for one micro-batch: a chunk counts 1/chunks, from the start of its F to
    the end of its B or W; the parts of an Overlap are alive together.
    """
    return np.array([live.max(initial=0) for live in _live_chunks(schedule)]) / schedule.chunks


def _live_chunks(schedule: Schedule) -> Iterator[np.ndarray]:
    """For each rank, how many chunks' activations are alive during each row."""
    for order in schedule.orders:
        op = order.rows[:, 1]
        gained = (op == Op.F).astype(np.int64)
        freed = ((op == Op.B) | (op == Op.W)).astype(np.int64)
        first, second = order.joined, order.joined + 1
        gained[first], gained[second] = gained[first] + gained[second], 0
        freed[second], freed[first] = freed[first] + freed[second], 0
        yield np.cumsum(gained) - np.cumsum(freed) + freed


def select(rows: Rows, at: np.ndarray) -> Rows:
    return Rows(*(column[at] for column in rows))


def action_at(rows: Rows, row: SupportsInt) -> Action:
    at = int(row)
    return Action(int(rows.stage[at]), Op(int(rows.op[at])), int(rows.microbatch[at]))


def _within(values: np.ndarray, count: int) -> np.ndarray:
    return (values >= 0) & (values < count)


def _runs(count: int) -> str:
    return {0: "never runs", 1: "runs once", 2: "runs twice"}.get(int(count), f"runs {count} times")


def _miscounted(schedule: Schedule, action: Action, text: str) -> Violation:
    return Violation(schedule.rank_of(action.stage, action.microbatch), action, "completeness", text)
