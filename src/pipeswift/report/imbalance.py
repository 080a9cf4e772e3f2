"""How uneven the loads of experts were in one step, read off the counters of its traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeswift.trace import Trace

ROWS, TAKEN = "rows", "taken"  # counters "3.1: rows 5" are of layer 3.1; see `pipeswift.moe`

Loads = Mapping[tuple[int, str], np.ndarray]  # by (rank, layer), of shape (micro-batches, experts or ranks)


class Imbalance(NamedTuple):
    """Largest load over the mean, in one stage; 1 when even.

    expert: of one expert, in the layer where that is most. rank: of one rank of an expert group, all layers of the
    stage together, in the group where that is most. microbatch: the same for each micro-batch by itself, as their mean,
    which is what all-to-alls wait for. None where ranks do not share out experts.
    """

    stage: int
    expert: float
    rank: float | None
    microbatch: float | None


def imbalance(replicas: Sequence[Trace], layout: Sequence[int]) -> list[Imbalance]:
    """By stage, of those with experts. replicas: the traces of one step. layout: layers per stage."""
    chosen, ends = _loads(replicas, ROWS), np.cumsum(layout)
    size = next((taken.shape[1] for taken in _loads(replicas[:1], TAKEN).values()), 0)  # of an expert group
    groups = [_loads(replicas[first : first + size], TAKEN) for first in range(0, len(replicas), size)] if size else []
    places: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for rank, layer in chosen:
        places[int(np.searchsorted(ends, int(layer.split(".")[0]), side="right"))].append((rank, layer))
    return [
        Imbalance(stage, max(_ratio(chosen[place].sum(0)) for place in here), *_over_ranks(groups, here))
        for stage, here in sorted(places.items())
    ]


def _over_ranks(groups: Sequence[Loads], places: Sequence[tuple[int, str]]) -> tuple[float | None, float | None]:
    """(of a step, of its micro-batches)."""
    together = [
        sum((taken[place] for place in places if place[0] == rank), np.zeros(()))
        for taken in groups
        for rank in {rank for rank, _ in places}
    ]
    if not together:
        return None, None
    return max(_ratio(rows.sum(0)) for rows in together), max(float(np.mean([*map(_ratio, rows)])) for rows in together)


def _loads(replicas: Sequence[Trace], name: str) -> Loads:
    """The sums over replicas of what the counters of that name say."""
    found: dict[tuple[int, str], np.ndarray] = {}
    for trace in replicas:
        columns: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)
        for counter in trace.counters:
            layer, _, told = counter.name.partition(": ")
            if told.rpartition(" ")[0] == name:
                columns[counter.rank, layer].append(counter.value)
        for place, values in columns.items():
            found[place] = found.get(place, 0) + np.stack(values, axis=1)
    return found


def _ratio(loads: np.ndarray) -> float:
    mean = loads.mean()
    return float(loads.max() / mean) if mean else 1.0
