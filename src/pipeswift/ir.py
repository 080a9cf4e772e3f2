"""The vocabulary: actions, what each one needs, and schedules made of them.

Two actions are linked only through what they make and need (`MAKES`, `NEEDS`). Verifier, simulator, policies and
runtime all read these two tables, so there is one answer to the question "what may start now?".
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple, overload

import numpy as np


class Op(IntEnum):
    """One pass of one stage over one micro-batch."""

    F = 0  # forward
    I = 1  # backward, gradient of the input only  # noqa: E741 (the field's name for it)
    W = 2  # backward, gradient of the weights only
    B = 3  # backward, both at once

    __hash__ = int.__hash__  # Enum's is a Python function, and actions are looked up all the time


class Product(IntEnum):
    """What a pass leaves behind for others."""

    OUTPUT = 0  # the stage's output, needed by the next stage's F and by this stage's backward
    GRADIENT = 1  # the gradient of the stage's input, needed by the stage before and by this stage's W
    WEIGHT_GRADIENT = 2  # needed by the optimizer

    __hash__ = int.__hash__


#: For each op, what it makes.
MAKES: tuple[tuple[Product, ...], ...] = (
    (Product.OUTPUT,),
    (Product.GRADIENT,),
    (Product.WEIGHT_GRADIENT,),
    (Product.GRADIENT, Product.WEIGHT_GRADIENT),
)

#: For each op, what it needs: (product, stage relative to its own), always of the same micro-batch.
NEEDS: tuple[tuple[tuple[Product, int], ...], ...] = (
    ((Product.OUTPUT, -1),),
    ((Product.OUTPUT, 0), (Product.GRADIENT, +1)),
    ((Product.GRADIENT, 0),),
    ((Product.OUTPUT, 0), (Product.GRADIENT, +1)),
)


class Action(NamedTuple):
    """One op of one stage on one micro-batch; reads "2F5"."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{'FIWB'[self.op]}{self.microbatch}"


class Overlap(NamedTuple):
    """Two actions of one rank woven into each other; starts when the inputs of both are there."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first};{self.second})OVERLAP_F_B"


def F(stage: int, microbatch: int) -> Action:
    return Action(stage, Op.F, microbatch)


def I(stage: int, microbatch: int) -> Action:  # noqa: E743
    return Action(stage, Op.I, microbatch)


def W(stage: int, microbatch: int) -> Action:
    return Action(stage, Op.W, microbatch)


def B(stage: int, microbatch: int) -> Action:
    return Action(stage, Op.B, microbatch)


def parts(entry: Action | Overlap) -> tuple[Action, ...]:
    """The actions of one entry of an order: one, or the two of an Overlap."""
    return (entry,) if isinstance(entry, Action) else (entry.first, entry.second)


def needs(action: Action, num_stages: int) -> tuple[tuple[Product, int], ...]:
    """What must exist before `action` may start, as (product, stage) of the action's own micro-batch.

    The first stage's F and the last stage's backward lack a neighbour, and so the need for its product.
    """
    return tuple(
        (product, action.stage + offset)
        for product, offset in NEEDS[action.op]
        if 0 <= action.stage + offset < num_stages
    )


class Order(Sequence[Action | Overlap]):
    """What one rank does, in order; packed in `rows`, read as Actions and Overlaps.

    rows: int32, shape (actions, 3), columns stage, op, microbatch. An Overlap takes two consecutive rows;
    `joined` holds the index of the first of the two, ascending.
    """

    __slots__ = ("_starts", "joined", "rows")

    def __init__(self, rows: np.ndarray, joined: np.ndarray | Sequence[int] = ()):
        self.rows = np.ascontiguousarray(rows, dtype=np.int32).reshape(-1, 3)
        self.joined = np.asarray(joined, dtype=np.int64)
        for array in (self.rows, self.joined):
            array.setflags(write=False)
        self._starts = np.delete(np.arange(len(self.rows)), self.joined + 1) if len(self.joined) else None

    @classmethod
    def of(cls, entries: Iterable[Action | Overlap]) -> Order:
        rows: list[Action] = []
        joined: list[int] = []
        for entry in entries:
            if isinstance(entry, Overlap):
                joined.append(len(rows))
                rows += entry
            else:
                rows.append(entry)
        # Number by number: numpy is slow to find out the shape of a list of tuples.
        packed = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=3 * len(rows))
        return cls(packed, joined)

    def __len__(self) -> int:
        return len(self.rows) - len(self.joined)

    @overload
    def __getitem__(self, index: int) -> Action | Overlap: ...
    @overload
    def __getitem__(self, index: slice) -> list[Action | Overlap]: ...
    def __getitem__(self, index: int | slice) -> Action | Overlap | list[Action | Overlap]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        row = index if self._starts is None else int(self._starts[index])
        first = self._action(row)
        at = np.searchsorted(self.joined, row)
        if at < len(self.joined) and self.joined[at] == row:
            return Overlap(first, self._action(row + 1))
        return first

    def __iter__(self) -> Iterator[Action | Overlap]:
        actions = self.actions()
        joined = set(self.joined.tolist())
        row = 0
        for action in actions:
            if row in joined:
                yield Overlap(action, next(actions))
                row += 1
            else:
                yield action
            row += 1

    def actions(self) -> Iterator[Action]:
        """Every action, the two parts of an Overlap one after the other."""
        ops = tuple(Op)
        return (Action(stage, ops[op], microbatch) for stage, op, microbatch in self.rows.tolist())

    def _action(self, row: int) -> Action:
        stage, op, microbatch = self.rows[row].tolist()
        return Action(stage, Op(op), microbatch)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Order):
            return NotImplemented
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.joined, other.joined)

    def __hash__(self) -> int:
        return hash((self.rows.tobytes(), self.joined.tobytes()))

    def __repr__(self) -> str:
        return f"Order({' '.join(map(str, self))})"


Placement = Callable[[int, int], int]  # (stage, ranks) -> rank


def loop(stage: int, ranks: int) -> int:
    """Stages go round and round: rank r holds stages r, r + p, r + 2p, ..."""
    return stage % ranks


def vee(stage: int, ranks: int) -> int:
    """Stages go there and back: with two chunks, rank r holds stages r and 2p - 1 - r."""
    turn, place = divmod(stage, ranks)
    return place if turn % 2 == 0 else ranks - 1 - place


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order; no time in it.

    orders[r] is what rank r does. routes[k][s] is the rank that holds stage s on route k, and route_of[i] the route
    that micro-batch i takes: one route for ordinary schedules, two opposite ones for DualPipe.
    flush: whether the step ends with an empty pipeline (every synchronous schedule).
    options: what made it besides p and m, for people and files to read.
    """

    orders: tuple[Order, ...]
    routes: tuple[tuple[int, ...], ...]
    route_of: tuple[int, ...]
    name: str = "custom"
    flush: bool = True
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    @classmethod
    def one_route(
        cls,
        order: Callable[[int], Iterable[Action | Overlap]],
        *,
        ranks: int,
        microbatches: int,
        chunks: int = 1,
        placement: Placement = loop,
        name: str = "custom",
    ) -> Schedule:
        """The ordinary case: every stage on one rank. `order(r)` yields what rank r does."""
        return cls(
            orders=tuple(Order.of(order(rank)) for rank in range(ranks)),
            routes=(tuple(placement(stage, ranks) for stage in range(ranks * chunks)),),
            route_of=(0,) * microbatches,
            name=name,
        )

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.routes[0])

    @property
    def num_microbatches(self) -> int:
        return len(self.route_of)

    @property
    def num_actions(self) -> int:
        return sum(len(order.rows) for order in self.orders)

    @cached_property
    def chunks(self) -> int:
        """The most stages that one rank holds on one route."""
        return max(int(np.bincount(route).max()) for route in self.routes)

    @cached_property
    def parameters(self) -> float:
        """The most parameters that one rank holds, if all stages are equal; 1 is a p-th of the model."""
        held = {(rank, stage) for route in self.routes for stage, rank in enumerate(route)}
        most = max(Counter(rank for rank, _ in held).values())
        return most * self.num_ranks / self.num_stages

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.routes[self.route_of[microbatch]][stage]

    def stages_on(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(route, stage) of everything that `rank` holds, in that order."""
        return tuple(
            (k, stage) for k, route in enumerate(self.routes) for stage, holder in enumerate(route) if holder == rank
        )

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(np.isin(order.rows[:, 1], (Op.I, Op.W)).any() for order in self.orders)

    @cached_property
    def overlaps(self) -> bool:
        """Whether any entry is an Overlap."""
        return any(len(order.joined) for order in self.orders)

    @cached_property
    def forward_only(self) -> bool:
        """Whether nothing is trained: every action is an F."""
        return all((order.rows[:, 1] == Op.F).all() for order in self.orders)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for schedules that do the same thing, whatever they are called."""
        digest = hashlib.sha256(repr((self.routes, self.route_of, self.flush)).encode())
        for order in self.orders:
            digest.update(order.rows.tobytes() + b"|" + order.joined.tobytes() + b"/")
        return digest.hexdigest()
