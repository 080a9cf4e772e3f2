"""Passes over schedules: rewrites of a schedule, and what a schedule implies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from pipeswift.ir import MAKES, NEEDS, Action, Op, Order, Overlap, Product, Schedule, needs, parts


def split_backward(schedule: Schedule) -> Schedule:
    """Every B as an I with its W right behind it; a W that leaves an Overlap follows the Overlap."""
    return replace(schedule, orders=tuple(map(_split, schedule.orders)))


def _split(order: Order) -> Order:
    entry = _entry_of_rows(order)
    whole = order.rows[:, 1] == Op.B
    kept = np.where(whole[:, None] & (np.arange(3) == 1), Op.I, order.rows)
    added = order.rows[whole] * (1, 0, 1) + (0, Op.W, 0)
    arrangement = np.argsort(np.concatenate([entry, entry[whole]]), kind="stable")
    moved_to = np.argsort(arrangement)
    return Order(np.concatenate([kept, added])[arrangement], moved_to[order.joined])


def fuse_backward(schedule: Schedule) -> Schedule:
    """Every I that its own W follows at once as a B; other I and W, and those in an Overlap, stay."""
    return replace(schedule, orders=tuple(map(_fuse, schedule.orders)))


def _fuse(order: Order) -> Order:
    rows = order.rows
    fused = (rows[:-1, 1] == Op.I) & (rows[1:, 1] == Op.W) & (rows[:-1, ::2] == rows[1:, ::2]).all(axis=1)
    first = np.setdiff1d(np.flatnonzero(fused), np.concatenate([order.joined, order.joined + 1, order.joined - 1]))
    changed = rows.copy()
    changed[first, 1] = Op.B
    return Order(np.delete(changed, first + 1, axis=0), order.joined - np.searchsorted(first, order.joined))


def weight_runs(order: Order) -> list[tuple[int, tuple[int, ...]]]:
    """(stage, micro-batches) of the W that stand next to each other in the order and belong to one stage."""

    def stage_of(entry: Action | Overlap) -> int:
        return entry.stage if isinstance(entry, Action) and entry.op is Op.W else -1

    runs = ((stage, tuple(entries)) for stage, entries in groupby(order, key=stage_of) if stage >= 0)
    return [(stage, tuple(action.microbatch for entry in run for action in parts(entry))) for stage, run in runs]


def overlap(schedule: Schedule) -> Schedule:
    """Each rank's next forward woven into its next backward wherever neither waits for the other; each keeps its order.

    Ranks go in lockstep: in every turn a rank runs its next forward and its next backward, together if it can run both,
    given what was made in the turns before. So a micro-batch moves on by one rank per turn, forwards as well as
    backwards, and a rank warms up with the forwards that come before its first gradient.
    Raises ValueError for a schedule whose backwards are split, or which cannot finish.
    """
    if schedule.splits_backward:
        raise ValueError(f"{schedule.name} splits its backwards: weave whole ones, then split them")
    waiting = [[_only(order, Op.F), _only(order, Op.B)] for order in schedule.orders]
    orders: list[list[Action | Overlap]] = [[] for _ in waiting]
    made: set[tuple[Product, int, int]] = set()
    while any(map(any, waiting)):
        turn = [[queue for queue in queues if queue and _has_come(queue[0], schedule, made)] for queues in waiting]
        if not any(turn):
            raise ValueError(f"{schedule.name} cannot finish: no rank has what its next pass needs")
        for order, queues in zip(orders, turn, strict=True):
            actions = [queue.popleft() for queue in queues]
            made.update((product, stage, i) for stage, op, i in actions for product in MAKES[op])
            order += [Overlap(*actions)] if len(actions) == 2 else actions
    return replace(schedule, orders=tuple(map(Order.of, orders)))


def _only(order: Order, op: Op) -> deque[Action]:
    return deque(action for action in order.actions() if action.op is op)


def _has_come(action: Action, schedule: Schedule, made: set[tuple[Product, int, int]]) -> bool:
    return all((product, stage, action.microbatch) in made for product, stage in needs(action, schedule.num_stages))


class Rows(NamedTuple):
    """Every action of a schedule, rank after rank, in order; int64 arrays, shape (actions,).

    entry numbers the entries of all orders through; the two parts of an Overlap share one.
    """

    rank: np.ndarray
    entry: np.ndarray
    stage: np.ndarray
    op: np.ndarray
    microbatch: np.ndarray


def rows_of(schedule: Schedule) -> Rows:
    """The actions of all ranks as one table."""
    orders = schedule.orders
    rank = np.repeat(np.arange(len(orders)), [len(order.rows) for order in orders])
    offsets = np.cumsum([0, *(len(order) for order in orders)])
    entry = np.concatenate([_entry_of_rows(order) + at for order, at in zip(orders, offsets, strict=False)])
    return Rows(rank, entry, *np.concatenate([order.rows for order in orders]).T.astype(np.int64))


class Links(NamedTuple):
    """Who waits for whom: row `consumer` needs the `product` that row `maker` makes; int64 arrays, shape (links,)."""

    product: np.ndarray
    maker: np.ndarray
    consumer: np.ndarray


def links(schedule: Schedule, rows: Rows) -> Links:
    """`ir.NEEDS` of every action of a complete schedule, as pairs of rows of `rows_of(schedule)`."""
    rows_with = [np.flatnonzero(rows.op == op) for op in Op]
    made = np.full((len(Product), schedule.num_stages, schedule.num_microbatches), -1)
    for op, products in zip(Op, MAKES, strict=True):
        at = rows_with[op]
        made[np.array(products)[:, None], rows.stage[at], rows.microbatch[at]] = at
    found: list[Links] = []
    for op, wanted in zip(Op, NEEDS, strict=True):
        for product, offset in wanted:
            stage = rows.stage[rows_with[op]] + offset
            exists = (stage >= 0) & (stage < schedule.num_stages)
            consumer = rows_with[op][exists]
            maker = made[product, stage[exists], rows.microbatch[consumer]]
            found.append(Links(np.full(len(consumer), product), maker, consumer))
    return Links(*(np.concatenate(column) for column in zip(*found, strict=True)))


class Transfer(NamedTuple):
    """One message: what the action (stage, ., microbatch) made goes from one rank to another.

    boundary: the lower of the two stages that it passes between.
    """

    product: Product
    stage: int
    microbatch: int
    source: int
    destination: int
    boundary: int


@dataclass(frozen=True)
class Transfers:
    """All messages of a schedule, by source rank, then in the order sent; int64 arrays, shape (messages,).

    maker, consumer: the rows of `rows_of(schedule)` that send and take the message.
    """

    product: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    boundary: np.ndarray
    maker: np.ndarray
    consumer: np.ndarray

    def __len__(self) -> int:
        return len(self.product)

    def __iter__(self) -> Iterator[Transfer]:
        columns = (self.product, self.stage, self.microbatch, self.source, self.destination, self.boundary)
        for product, *rest in zip(*(column.tolist() for column in columns), strict=True):
            yield Transfer(Product(product), *rest)


def transfers(schedule: Schedule) -> Transfers:
    """The messages that a complete schedule implies: every product needed on another rank than its maker's."""
    rows = rows_of(schedule)
    product, maker, consumer = links(schedule, rows)
    crossing = np.flatnonzero(rows.rank[maker] != rows.rank[consumer])
    sent = crossing[np.argsort(maker[crossing], kind="stable")]
    maker, consumer = maker[sent], consumer[sent]
    return Transfers(
        product=product[sent],
        stage=rows.stage[maker],
        microbatch=rows.microbatch[maker],
        source=rows.rank[maker],
        destination=rows.rank[consumer],
        boundary=np.minimum(rows.stage[maker], rows.stage[consumer]),
        maker=maker,
        consumer=consumer,
    )


def _entry_of_rows(order: Order) -> np.ndarray:
    """For each row, the index of its entry in the order."""
    row = np.arange(len(order.rows))
    return row - np.searchsorted(order.joined, row)
