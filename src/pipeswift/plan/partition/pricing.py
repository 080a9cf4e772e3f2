"""What a stage costs: seconds and bytes of layers i to j - 1 on ranks a to b - 1, from prefix sums."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np

from pipeswift.plan.partition.problem import Problem

Cuts = int | np.ndarray
NEAR, FAR = 0, 1  # a boundary as between neighbours, or as between hosts


class Pricing:
    """The prices of a problem. Stages are named by seats: seat s is stage s's place, which is rank s without chunks.

    Cuts may be numbers, or arrays that broadcast.
    """

    def __init__(self, problem: Problem):
        layers, machine = problem.layers, problem.machine
        self.problem = problem
        rank_of = list(problem.rank_of)
        self.speed, self.limit, self.host = machine.speeds[rank_of], machine.memory[rank_of], machine.hosts[rank_of]
        self.work, self.saved = _prefix(layers.seconds), _prefix(layers.saved_bytes)
        self.parameters, self.state = _prefix(layers.parameter_bytes), _prefix(layers.state_bytes)
        self.crossing = np.concatenate([[0.0], 2 * layers.output_bytes[:-1], [0.0]])

    @cached_property
    def rate(self) -> np.ndarray:
        """Bytes per second over the boundary before each seat, shape (2, seats + 1), [NEAR or FAR, seat]."""
        rank_of, machine = self.problem.rank_of, self.problem.machine
        rates = np.full((2, len(rank_of) + 1), np.inf)
        for seat, (left, right) in enumerate(pairwise(rank_of), start=1):
            if left != right:
                inside = machine.hosts[left] == machine.hosts[right]
                rates[:, seat] = machine.inside if inside else machine.between, machine.between
        return rates

    def straddles(self, a: int, b: int) -> bool:
        """Whether the ranks are on more than one host, so that some of the boundary's traffic goes between hosts."""
        return bool(self.host[a] != self.host[b - 1])

    def compute(self, a: int, b: int, i: Cuts, j: Cuts) -> np.ndarray:
        """Seconds per micro-batch, replicas and their exchange of gradients included (PipeDream, sec. 3.1)."""
        work = (self.work[j] - self.work[i]) / self.speed[a:b].min()
        replicas = b - a
        if replicas == 1:
            return work
        rate = self.problem.machine.between if self.straddles(a, b) else self.problem.machine.inside
        exchange = 4 * (replicas - 1) / replicas * (self.parameters[j] - self.parameters[i]) / rate
        return np.maximum(work, exchange) / replicas

    def transfer(self, kind: int, seat: int, cut: Cuts) -> np.ndarray:
        """Seconds that one micro-batch takes over the boundary before a seat, both ways."""
        return self.crossing[cut] / self.rate[kind, seat]

    def seconds(self, a: int, b: int, i: Cuts, j: Cuts, kinds: tuple[int, int]) -> np.ndarray:
        """Seconds per micro-batch with the transfers on both sides, whose kinds are given."""
        compute = self.compute(a, b, i, j)
        before, after = self.transfer(kinds[0], a, i), self.transfer(kinds[1], b, j)
        if self.problem.transfers == "within":
            return compute + before + after
        return np.maximum(compute, np.maximum(before, after))

    def bytes(self, a: int, b: int, i: Cuts, j: Cuts) -> np.ndarray:
        """What each replica holds at most."""
        held = self._count(self.problem.in_flight, a, b, 0)
        versions = self._count(self.problem.versions, a, b, 1)
        return (
            versions * (self.parameters[j] - self.parameters[i])
            + (self.state[j] - self.state[i])
            + held * (self.saved[j] - self.saved[i])
        )

    def rank_seconds(self, cuts: np.ndarray) -> np.ndarray:
        """Seconds of each rank, its stages together, for cuts of all stages, shape (..., stages + 1) -> (..., ranks).

        Transfers beside them are the boundaries of a pair of ranks together, and count for both.
        """
        total = (np.diff(self.work[cuts]) / self.speed) @ self._on_rank
        crossing = self.crossing[cuts[..., 1:-1]] / self.rate[NEAR, 1:-1]
        for pair, seats in self._pairs.items():
            seconds = crossing[..., seats].sum(axis=-1)
            for rank in pair:
                mine = total[..., rank]
                total[..., rank] = mine + seconds if self.problem.transfers == "within" else np.maximum(mine, seconds)
        return total

    def rank_bytes(self, cuts: np.ndarray) -> np.ndarray:
        """What each rank holds at most, likewise."""
        seats = range(self.problem.stages)
        held = [self.bytes(seat, seat + 1, cuts[..., seat], cuts[..., seat + 1]) for seat in seats]
        return np.stack(held, axis=-1) @ self._on_rank

    @cached_property
    def _on_rank(self) -> np.ndarray:
        """1 where a seat is on a rank, shape (seats, ranks)."""
        return np.eye(len(self.problem.machine))[list(self.problem.rank_of)]

    @cached_property
    def _pairs(self) -> dict[frozenset[int], list[int]]:
        """Boundaries by the pair of ranks that they connect; boundary s is behind seat s."""
        pairs: dict[frozenset[int], list[int]] = {}
        for boundary, ends in enumerate(pairwise(self.problem.rank_of)):
            if ends[0] != ends[1]:
                pairs.setdefault(frozenset(ends), []).append(boundary)
        return pairs

    def _count(self, counts: np.ndarray | None, a: int, b: int, default: int) -> float:
        if counts is None:
            return default
        return float(counts[a, b - a - 1] if self.problem.replicate else counts[a])


def _prefix(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])
