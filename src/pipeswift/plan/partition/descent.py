"""The local search: from a cut of chunks to a better one, by moving one or two of its cuts at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import numpy as np

from pipeswift.plan.partition.partition import ROUNDING, Stage
from pipeswift.plan.partition.pricing import Pricing

STEEPNESS = 24  # the power that makes a sum over ranks nearly their maximum

Height = Callable[[np.ndarray], np.ndarray]  # cuts, shape (..., stages + 1), to what is to be low


def speed_up(pricing: Pricing, stages: Sequence[Stage]) -> list[Stage]:
    """A cut under which the slowest rank is faster, unless no move of one or two cuts by one place makes it so."""
    ideal = pricing.work[-1] / pricing.problem.machine.speeds.sum() or 1.0
    return _descend(pricing, stages, lambda cuts: ((pricing.rank_seconds(cuts) / ideal) ** STEEPNESS).sum(axis=-1))


def level(pricing: Pricing, stages: Sequence[Stage]) -> list[Stage]:
    """A cut whose stages are more alike, likewise, and whose ranks take no longer than the slowest does now."""
    limit = pricing.rank_seconds(_cuts(stages)).max() * (1 + ROUNDING)

    def unevenness(cuts: np.ndarray) -> np.ndarray:
        squares = (np.diff(pricing.work[cuts]) / pricing.speed) ** 2
        return np.where(pricing.rank_seconds(cuts).max(axis=-1) <= limit, squares.sum(axis=-1), np.inf)

    return _descend(pricing, stages, unevenness)


def _descend(pricing: Pricing, stages: Sequence[Stage], height: Height) -> list[Stage]:
    """From a cut within memory to one from which no move goes down; all on the way keep memory and pins."""
    places = np.flatnonzero(pricing.problem.cuts)
    at = np.searchsorted(places, _cuts(stages))
    moves = _moves(pricing, at, places)

    def allowed_height(candidates: np.ndarray) -> np.ndarray:
        cuts = places[candidates]
        fits = (np.diff(cuts) > 0).all(axis=-1)
        fits &= (pricing.rank_bytes(cuts) <= pricing.problem.machine.memory * (1 + ROUNDING)).all(axis=-1)
        return np.where(fits, height(cuts), np.inf)

    now = float(allowed_height(at))
    while len(moves):
        heights = allowed_height(at + moves)
        lowest = int(np.argmin(heights))
        if not heights[lowest] < now * (1 - ROUNDING):
            break
        now, at = float(heights[lowest]), at + moves[lowest]
    return [Stage(i, j, 1) for i, j in pairwise(places[at].tolist())]


def _cuts(stages: Sequence[Stage]) -> np.ndarray:
    return np.array([0, *(stage.end for stage in stages)])


def _moves(pricing: Pricing, at: np.ndarray, places: np.ndarray) -> np.ndarray:
    """One place up or down for one cut, or for two; the ends and the forced cuts stay."""
    forced = [layer + 1 for layer in pricing.problem.apart]
    free = [cut for cut in range(1, len(at) - 1) if places[at[cut]] not in forced]
    steps = np.eye(len(at), dtype=int)[free]
    singles = [*steps, *-steps]
    pairs = [
        s * steps[one] + t * steps[two]
        for one, two in combinations(range(len(steps)), 2)
        for s in (1, -1)
        for t in (1, -1)
    ]
    return np.array([*singles, *pairs], dtype=int).reshape(-1, len(at))
