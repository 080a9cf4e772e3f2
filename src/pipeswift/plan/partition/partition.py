"""A partition, and its seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipeswift.plan.partition.pricing import FAR, NEAR, Pricing
from pipeswift.plan.partition.problem import Infeasible, PartitionError, Problem

ROUNDING = 1e-9  # relative; sums may be off by this much


class Stage(NamedTuple):
    """Layers `first` to `end` - 1, on so many ranks."""

    first: int
    end: int
    replicas: int


@dataclass(frozen=True)
class Partition:
    """A cut with its price.

    stage_seconds: per micro-batch, transfers included as the problem says. stage_bytes: on each replica.
    rank_seconds, rank_bytes: the stages of a rank together. bottleneck: the largest of stage_seconds, or of
    rank_seconds if that is the objective. gap: the share of the bottleneck that another cut could save at most; 0 if
    none can.
    """

    stages: tuple[Stage, ...]
    stage_seconds: tuple[float, ...]
    stage_bytes: tuple[float, ...]
    rank_seconds: tuple[float, ...]
    rank_bytes: tuple[float, ...]
    bottleneck: float
    gap: float = 0.0

    @property
    def layout(self) -> tuple[int, ...]:
        """Layers per stage, as `Pipeline` takes them."""
        return tuple(stage.end - stage.first for stage in self.stages)


def evaluate(problem: Problem, layout: Sequence[int], replicas: Sequence[int] | None = None) -> Partition:
    """The price of a given cut: layers per stage, and ranks per stage where the problem allows replicas.

    Its gap is not known, so it is nan. Raises PartitionError when the numbers do not fit the problem, Infeasible when a
    rank's memory does not do.
    """
    return fitting(problem, price(problem, _stages(problem, layout, replicas), gap=float("nan")))


def price(problem: Problem, stages: Sequence[Stage], *, gap: float = 0.0) -> Partition:
    """The partition that these stages make, whatever the memory."""
    pricing = Pricing(problem)
    seats = np.cumsum([0, *(stage.replicas for stage in stages)]).tolist()
    places = list(pairwise(seats))
    far = [pricing.straddles(a, b) for a, b in places]
    kinds = [NEAR, *(FAR if left or right else NEAR for left, right in pairwise(far)), NEAR]
    seconds = [
        float(pricing.seconds(*place, stage.first, stage.end, (left, right)))
        for place, stage, left, right in zip(places, stages, kinds[:-1], kinds[1:], strict=True)
    ]
    held = [float(pricing.bytes(*place, stage.first, stage.end)) for place, stage in zip(places, stages, strict=True)]
    if problem.chunks > 1:
        cuts = np.array([0, *(stage.end for stage in stages)])
        rank_seconds, rank_bytes = pricing.rank_seconds(cuts), pricing.rank_bytes(cuts)
    else:
        seat_of = np.argsort(problem.rank_of)
        stage_of = np.repeat(np.arange(len(stages)), [stage.replicas for stage in stages])[seat_of]
        rank_seconds, rank_bytes = np.array(seconds)[stage_of], np.array(held)[stage_of]
    slowest = max(rank_seconds) if problem.objective == "rank" else max(seconds)
    return Partition(
        stages=tuple(stages),
        stage_seconds=tuple(seconds),
        stage_bytes=tuple(held),
        rank_seconds=tuple(rank_seconds.tolist()),
        rank_bytes=tuple(rank_bytes.tolist()),
        bottleneck=float(slowest),
        gap=gap,
    )


def fitting(problem: Problem, found: Partition) -> Partition:
    """The partition itself. Raises Infeasible, naming a rank, when it needs more memory than there is."""
    over = excess(problem, found)
    rank = int(np.argmax(over))
    if over[rank] > 1 + ROUNDING:
        raise Infeasible(
            f"memory does not do: with layout {list(found.layout)}, rank {rank} needs {found.rank_bytes[rank]:.6g} "
            f"bytes and has {problem.machine.memory[rank]:.6g}. Give it as much, or move layers away from it."
        )
    return found


def excess(problem: Problem, found: Partition) -> np.ndarray:
    """What each rank needs over what it has, shape (ranks,)."""
    return np.array(found.rank_bytes) / problem.machine.memory


def _stages(problem: Problem, layout: Sequence[int], replicas: Sequence[int] | None) -> list[Stage]:
    layers, ranks = len(problem.layers), len(problem.machine)
    replicas = [1] * len(layout) if replicas is None else replicas
    if any(size < 1 for size in layout) or sum(layout) != layers:
        raise PartitionError(
            f"layout {list(layout)} does not cut {layers} layers: sizes must be at least 1 and sum to {layers}."
        )
    if not problem.replicate and (len(layout) != problem.stages or any(count != 1 for count in replicas)):
        raise PartitionError(
            f"layout names {len(layout)} stages, and there are {problem.stages}, each on one rank: give as many sizes."
        )
    if len(replicas) != len(layout) or min(replicas) < 1 or (problem.replicate and sum(replicas) != ranks):
        raise PartitionError(
            f"replicas {list(replicas)} do not give {len(layout)} stages the {ranks} ranks: one number of at least 1 "
            f"per stage, in all {ranks}."
        )
    ends = np.cumsum(layout).tolist()
    return [Stage(end - size, end, count) for size, end, count in zip(layout, ends, replicas, strict=True)]
