"""What a layer may know about the pass that it is part of, or about the rank that it is built on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Skips(threading.local):
    """What layers have put aside for layers after them, by name; one per thread, since tests run ranks as threads."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


class Surroundings(threading.local):
    """Where a layer is being built: which of how many ranks that share out its experts this one is."""

    expert_rank = 0
    expert_ranks = 1


@contextmanager
def building_for(rank: int, ranks: int) -> Iterator[None]:
    """Layers built inside keep the experts of that rank of an expert-parallel group, and build no others."""
    surroundings.expert_rank, surroundings.expert_ranks = rank, ranks
    try:
        yield
    finally:
        surroundings.expert_rank, surroundings.expert_ranks = 0, 1


class Place(NamedTuple):
    """Where a random number is drawn. key: of (seed, step). first_sample: where the micro-batch starts in the batch.

    use: how many draws of this kind came before in the layer. seeds: under which the pass can be found, to forget it.
    step: how many steps came before. microbatch: its number in its replica.
    """

    key: int
    layer: int
    first_sample: int
    use: int
    seeds: list[int]
    step: int = 0
    microbatch: int = 0


skips = Skips()
surroundings = Surroundings()

# By the seed of the generator that the layer's random functions draw from. It is part of the generator's state, so
# activation checkpointing brings it back before it runs a forward again, in whatever thread.
_places: dict[int, Place] = {}


def mark(seed: int, place: Place) -> None:
    """From now on the generator's seed stands for that place."""
    _places[seed] = place
    place.seeds.append(seed)


def place_of(seed: int) -> Place | None:
    return _places.get(seed)


def forget(seeds: list[int]) -> None:
    for seed in seeds:
        _places.pop(seed, None)
