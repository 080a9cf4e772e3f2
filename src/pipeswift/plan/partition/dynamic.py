"""The dynamic programme: the exact best cut where every stage has ranks to itself, or counts by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pipeswift.plan.partition.partition import ROUNDING, Stage
from pipeswift.plan.partition.pricing import FAR, NEAR, Pricing

Price = Callable[[int, int, np.ndarray, np.ndarray, tuple[int, int]], np.ndarray]
Combine = Callable[[np.ndarray, int, np.ndarray], np.ndarray]
SLACKS = (0.05, 0.2, 0.8, 3.0)  # of the ideal, where the best is looked for


class Programme:
    """Best cuts of layers i, ... for seats a, ..., from the last seat to the first.

    price(a, b, i, j, kinds) is what layers i to j - 1 cost on seats a to b - 1, wherever cuts may be; windows[a] are
    the cuts at which seat a may begin. A state is (kind of the boundary on the left, seat, cut). A boundary is FAR,
    between hosts, as soon as one of the groups beside it straddles two; any may be taken as FAR, since that never makes
    it cheaper, so a state need not know the group before.
    """

    def __init__(self, pricing: Pricing, price: Price, windows: list[np.ndarray]):
        self.pricing, self.price, self.windows = pricing, price, windows
        problem = pricing.problem
        self.seats, self.layers = problem.stages, len(problem.layers)
        self.most = self.seats if problem.replicate else 1
        self.closed = _closed(problem.cuts, [layer + 1 for layer in problem.apart])
        self.kinds = (NEAR, FAR) if problem.replicate and np.unique(pricing.host).size > 1 else (NEAR,)

    def best(self, limit: float) -> list[Stage]:
        """The cut whose dearest stage is cheapest and, among those, the one that spreads the rest most evenly.

        Even means the least sum of squares over ranks; then fewer replicas; then longer stages first.
        An empty list when the dearest of every cut costs more than `limit`.
        """
        dearest = float(self._solve(_dearest)[self.kinds[-1], 0, 0])
        if dearest > limit or np.isinf(dearest):
            return []
        even = _evenness(dearest)
        return list(self._walk(even, self._solve(even)))

    def _solve(self, combine: Combine) -> np.ndarray:
        """The best value of every state, shape (kinds, seats + 1, cuts)."""
        best = np.full((len(self.kinds), self.seats + 1, self.layers + 1), np.inf)
        best[:, self.seats, self.layers] = 0.0
        for a in reversed(range(self.seats)):
            for b, kinds in self._groups(a):
                for left in kinds:
                    for right in kinds:
                        rest = best[right, b, self.windows[b]]
                        values = combine(self._cost(a, b, self.windows[a], (left, right)), b - a, rest).min(axis=1)
                        best[left, a, self.windows[a]] = np.minimum(best[left, a, self.windows[a]], values)
        return best

    def _walk(self, combine: Combine, best: np.ndarray) -> Iterator[Stage]:
        kind, a, i = self.kinds[-1], 0, 0
        while a < self.seats:
            b, kind, j = self._step(combine, best, kind, a, i)
            yield Stage(i, j, b - a)
            a, i = b, j

    def _step(self, combine: Combine, best: np.ndarray, left: int, a: int, i: int) -> tuple[int, int, int]:
        target = best[left, a, i] * (1 + ROUNDING)
        for b, kinds in self._groups(a):
            for right in kinds if left in kinds else ():
                rest = best[right, b, self.windows[b]]
                row = combine(self._cost(a, b, np.array([i]), (left, right)), b - a, rest)[0]
                if row.min() <= target:
                    return b, right, int(self.windows[b][row <= target][-1])
        raise AssertionError("a state's value comes from one of its steps")

    def _groups(self, a: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Where a group that begins at a seat may end, and of which kinds its boundaries may be."""
        for b in range(a + 1, min(a + self.most, self.seats) + 1):
            if len(self.windows[a]) and len(self.windows[b]):
                yield b, (FAR,) if self.most > 1 and self.pricing.straddles(a, b) else self.kinds

    def _cost(self, a: int, b: int, i: np.ndarray, kinds: tuple[int, int]) -> np.ndarray:
        i, j = i[:, None], self.windows[b][None, :]
        return self.price(a, b, i, j, kinds) + self.closed[i, j]


def fastest(pricing: Pricing) -> list[Stage]:
    """The cut with the least slowest stage that keeps each rank's memory; chunks count by themselves, without memory.

    No rank of a cut within some limit does more than that, which leaves each seat a window of cuts to begin at. So the
    limit is raised from just above the ideal, at which all ranks do equally much, until there is a cut.
    """
    bounded = pricing.problem.chunks == 1 and bool(np.isfinite(pricing.limit).any())

    def price(a: int, b: int, i: np.ndarray, j: np.ndarray, kinds: tuple[int, int]) -> np.ndarray:
        seconds = pricing.seconds(a, b, i, j, kinds)
        if not bounded:
            return seconds
        return np.where(pricing.bytes(a, b, i, j) <= pricing.limit[a:b].min() * (1 + ROUNDING), seconds, np.inf)

    ideal = pricing.work[-1] / pricing.speed.sum()
    for limit in (*(ideal * (1 + slack) for slack in SLACKS), np.inf):
        if found := Programme(pricing, price, _windows(pricing, limit)).best(limit):
            return found
    return []


def leanest(pricing: Pricing) -> list[Stage]:
    """The cut that needs the least memory, as a share of what there is."""

    def price(a: int, b: int, i: np.ndarray, j: np.ndarray, kinds: tuple[int, int]) -> np.ndarray:
        return pricing.bytes(a, b, i, j) / pricing.limit[a:b].min()

    return Programme(pricing, price, _windows(pricing, np.inf)).best(np.inf)


def _windows(pricing: Pricing, limit: float) -> list[np.ndarray]:
    """For each seat, and the end, the cuts at which it may begin if no rank takes longer than `limit`."""
    before = np.concatenate([[0.0], np.cumsum(pricing.speed)])[:, None]
    if np.isinf(limit):
        return [np.arange(len(pricing.work))] * len(before)
    most, work = limit * (1 + ROUNDING), pricing.work[None, :]
    fits = (work <= most * before) & (work[:, -1:] - work <= most * (before[-1:] - before))
    return [np.flatnonzero(row) for row in fits]


def _closed(allowed: np.ndarray, forced: list[int]) -> np.ndarray:
    """0 where layers i to j - 1 may be a stage, else infinite."""
    cuts = np.arange(len(allowed))
    passed = np.zeros(len(allowed), dtype=int)
    passed[forced] = 1
    passed = np.cumsum(passed)
    inside = (passed[None, :] - np.isin(cuts, forced)[None, :]) - passed[:, None] > 0
    fits = allowed[:, None] & allowed[None, :] & (cuts[:, None] < cuts[None, :]) & ~inside
    return np.where(fits, 0.0, np.inf)


def _dearest(cost: np.ndarray, replicas: int, rest: np.ndarray) -> np.ndarray:
    return np.maximum(cost, rest)


def _evenness(limit: float) -> Combine:
    def combine(cost: np.ndarray, replicas: int, rest: np.ndarray) -> np.ndarray:
        return np.where(cost <= limit, replicas * cost * cost, np.inf) + rest

    return combine
