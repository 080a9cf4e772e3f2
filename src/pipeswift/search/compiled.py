"""A problem made ready for the compiled loops: decode a point, anneal orders."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeswift.search.pattern import Pattern
from pipeswift.search.problem import Problem

I = 1  # noqa: E741


class Point(NamedTuple):
    """What is decoded into orders: a pattern, and per rank how it is bent and where weight gradients go.

    shift: further forwards before each input gradient. fit: the share of a W that a gap has to hold to be given one.
    budget: idle seconds beyond which a rank fills any gap, however short. Arrays of shape (ranks,).
    """

    pattern: Pattern
    shift: np.ndarray
    fit: np.ndarray
    budget: np.ndarray


class Compiled:
    """The arrays of one problem that the compiled loops share. Making one loads Numba."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._reserve = np.array(
            [max(problem.memory[I, problem.rank_of == rank].max(), 0.0) for rank in range(problem.ranks)]
        )
        self._samples = np.stack([np.broadcast_to(costs.seconds, problem.seconds.shape) for costs in problem.draws])
        self._by_span = problem.objective == "span"

    def decode(self, point: Point) -> tuple[float, np.ndarray]:
        """(seconds, orders as in `pack`); infinite where the point cannot keep the limit."""
        from pipeswift.search.decode import decode

        problem = self.problem
        forwards, backwards, ahead, least = point.pattern
        bent = np.clip(ahead + point.shift[:, None], least, forwards.shape[1])
        orders = np.empty((problem.ranks, 3 * forwards.shape[1], 3), dtype=np.int32)
        first, last = decode(
            (forwards, backwards, bent),
            (point.fit, point.budget),
            problem.dependencies,
            problem.links,
            problem.seconds,
            problem.memory,
            problem.slack_limit,
            self._reserve,
            orders,
        )
        if not np.isfinite(last).all():
            return np.inf, orders
        if problem.variability:
            return self.value(orders), orders
        return float((last - first).max() if self._by_span else last.max()), orders

    def value(self, orders: np.ndarray) -> float:
        """The objective, in seconds."""
        return self.anneal(orders, reach=1, heat=0.0, seed=0, tries=0)

    def anneal(self, orders: np.ndarray, *, reach: int, heat: float, seed: int, tries: int) -> float:
        """Better `orders`, in place, and what they are worth in seconds; see `anneal.anneal`."""
        from pipeswift.search.anneal import anneal
        from pipeswift.simulate.kernel import Orders

        problem = self.problem
        rows = orders.reshape(-1, 3).view(np.uint32)
        packed = Orders(
            rows,
            np.zeros(len(rows), dtype=np.bool_),
            (np.arange(problem.ranks + 1) * orders.shape[1]).astype(np.uint64),
            np.zeros(problem.microbatches, dtype=np.uint32),
        )
        return anneal(
            packed,
            problem.dependencies,
            problem.links,
            self._samples,
            problem.memory,
            problem.slack_limit,
            self._by_span,
            reach,
            heat,
            seed,
            tries,
        )
