"""Where the experts of a layer live: which rank of an expert-parallel group holds which, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeswift.errors import PipeSwiftError


class PlacementError(PipeSwiftError):
    """The experts cannot be shared out as asked."""


@dataclass(frozen=True)
class Placement:
    """order: the experts by slot; the first E / ranks slots are those of rank 0 of the group, the next of rank 1..."""

    order: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        experts = len(self.order)
        if self.ranks < 1 or experts < 1 or experts % self.ranks:
            sizes = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
            raise PlacementError(
                f"{experts} experts do not spread evenly over ep = {self.ranks} ranks: use an ep that divides "
                f"{experts} ({sizes}), or a multiple of {self.ranks} experts"
            )
        if sorted(self.order) != list(range(experts)):
            raise PlacementError(f"a placement names every expert from 0 to {experts - 1} once: got {self.order}")

    @property
    def experts(self) -> int:
        return len(self.order)

    @property
    def per_rank(self) -> int:
        return self.experts // self.ranks

    @cached_property
    def slot_of(self) -> tuple[int, ...]:
        """Expert -> slot."""
        slots = [0] * self.experts
        for slot, expert in enumerate(self.order):
            slots[expert] = slot
        return tuple(slots)

    def rank_of(self, expert: int) -> int:
        """The rank, within the expert-parallel group, that holds the expert."""
        return self.slot_of[expert] // self.per_rank

    def held_by(self, rank: int) -> Sequence[int]:
        """The experts of one rank of the group, by local index."""
        return self.order[rank * self.per_rank : (rank + 1) * self.per_rank]


def contiguous(experts: int, ranks: int) -> Placement:
    """Expert e on rank e * ranks // experts."""
    return Placement(tuple(range(experts)), ranks)


def shuffled(experts: int, ranks: int, seed: int) -> Placement:
    """Experts at random, the same for a seed everywhere: what contiguous placement is compared with."""
    order = list(range(experts))
    random.Random(seed).shuffle(order)
    return Placement(tuple(order), ranks)
