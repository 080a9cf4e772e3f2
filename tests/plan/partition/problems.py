"""Random small problems, with everything that a problem may have; whole numbers, so that sums are exact."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipeswift.ir import loop, vee
from pipeswift.plan.partition import Layers, Machine, PartitionError, Problem

Kind = Literal["one stage per rank", "replicas", "chunks"]


def draw(random: np.random.Generator, kind: Kind) -> Problem:
    """A problem that has cuts, if memory allows them."""
    while True:
        try:
            return _draw(random, kind)
        except PartitionError:  # more pins than the layers can bear
            continue


def _draw(random: np.random.Generator, kind: Kind) -> Problem:
    replicate, chunks = kind == "replicas", int(random.integers(2, 4)) if kind == "chunks" else 1
    ranks = int(random.integers(1, 5 if chunks < 3 else 4))
    stages = ranks * chunks
    count = int(random.integers(1 if replicate else stages, 11))

    def numbers(low: int, high: int, shape: int | tuple[int, ...] = count) -> np.ndarray:
        return random.integers(low, high, shape).astype(float)

    def sometimes(value):
        return value if random.random() < 0.6 else None

    layers = Layers.of(
        numbers(1, 20),
        output_bytes=numbers(0, 20) * random.integers(0, 2),
        saved_bytes=numbers(0, 6),
        parameter_bytes=numbers(0, 10),
        state_bytes=numbers(0, 10),
    )
    shape = (ranks, ranks) if replicate else (stages,)
    share = float((layers.parameter_bytes + layers.state_bytes + 2 * layers.saved_bytes).sum()) / ranks
    speeds, memory = sometimes(random.choice([0.5, 1.0, 2.0, 4.0], ranks)), sometimes(numbers(30, 300, ranks))
    together = frozenset(np.flatnonzero(random.random(count - 1) < 0.1).tolist())
    apart = frozenset(np.flatnonzero(random.random(count - 1) < 0.05).tolist()) - together
    place = loop if random.random() < 0.5 else vee
    return Problem(
        layers,
        Machine.of(
            ranks,
            speeds=1.0 if speeds is None else speeds,
            memory=np.inf if memory is None else memory / 100 * share + 1,
            ranks_per_host=int(random.integers(1, 4)),
            inside=4.0,
            between=float(random.choice([1, 2, 4])),
        ),
        rank_of=tuple(place(stage, ranks) for stage in range(stages)) if chunks > 1 else (),
        replicate=replicate,
        in_flight=sometimes(numbers(1, 4, shape)),
        versions=sometimes(numbers(1, 3, shape)),
        together=together,
        apart=apart,
        transfers="beside" if random.random() < 0.5 else "within",
        objective="rank" if random.random() < 0.7 else "stage",
    )
