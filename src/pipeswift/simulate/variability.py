"""Swinging stage times: seeded factors on the seconds of each (stage, micro-batch), and what no order can beat."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op, Schedule

Pattern = Literal["iid", "ar1", "burst"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
CORRELATION = 0.9  # of ar1, from one micro-batch to the next
MOST = 3.0  # sigma


class VariabilityError(PipeSwiftError):
    """A swing that cannot be drawn."""


def factors(seed: int, stages: int, microbatches: int, sigma: float, pattern: Pattern = "iid") -> np.ndarray:
    """How much longer each micro-batch takes on each stage, shape (stages, microbatches); F, I and W share it.

    iid: log-normal, mean 1, `sigma` of the logarithm. ar1: likewise, correlated along the micro-batches of a stage.
    burst: two random stages are slower by 1 + 2 sigma for a quarter of the micro-batches in a row, the others take 1.
    Nothing but the seed, the stage and the micro-batch goes into a log-normal factor, so every schedule and policy
    sees the same. Raises VariabilityError for another pattern or a sigma out of range.
    """
    if pattern not in PATTERNS:
        raise VariabilityError(f"--pattern must be one of {', '.join(PATTERNS)}: got {pattern}. Use iid, say.")
    if not 0.0 <= sigma <= MOST:
        raise VariabilityError(f"--variability must be from 0 to {MOST:g}: got {sigma:g}. Use 0.4, say.")
    if pattern == "burst":
        return _burst(np.random.default_rng(seed), stages, microbatches, 1.0 + 2.0 * sigma)
    normal = np.stack([np.random.default_rng((seed, stage)).standard_normal(microbatches) for stage in range(stages)])
    if pattern == "ar1":
        for i in range(1, microbatches):
            normal[:, i] = CORRELATION * normal[:, i - 1] + np.sqrt(1.0 - CORRELATION**2) * normal[:, i]
    return np.exp(sigma * normal - sigma**2 / 2.0)


def _burst(draw: np.random.Generator, stages: int, microbatches: int, slow: float) -> np.ndarray:
    found = np.ones((stages, microbatches))
    length = max(microbatches // 4, 1)
    for stage in draw.choice(stages, size=min(2, stages), replace=False):
        begin = draw.integers(0, microbatches - length + 1)
        found[stage, begin : begin + length] = slow
    return found


def varied(costs: Costs, factors: np.ndarray) -> Costs:
    """The same costs with the passes of each (stage, micro-batch) longer by its factor."""
    return replace(costs, seconds=costs.seconds * factors[None])


def work_bound(schedule: Schedule, costs: Costs) -> float:
    """Seconds that no order can beat: the busiest rank's passes, after the first micro-batch has come to it.

    Takes the lowest micro-batch of each route to be its first everywhere; a B counts as I and W, and an Overlap as the
    sum of its parts.
    """
    seconds = np.broadcast_to(costs.seconds, (*costs.seconds.shape[:2], schedule.num_microbatches))
    latency = np.broadcast_to(costs.latency, (schedule.num_ranks, schedule.num_ranks))
    first, work = np.full(schedule.num_ranks, np.inf), np.zeros(schedule.num_ranks)
    for route, ranks in enumerate(schedule.routes):
        mine = np.flatnonzero(np.array(schedule.route_of) == route)
        if len(mine):
            holders = np.array(ranks)
            hops = np.where(holders[:-1] == holders[1:], 0.0, latency[holders[:-1], holders[1:]])
            head = np.concatenate(([0.0], np.cumsum(seconds[Op.F, :-1, mine[0]] + hops)))
            np.minimum.at(first, holders, head)
            np.add.at(work, holders, seconds[: Op.B, :, mine].sum(axis=(0, 2)))
    return float((first + work)[work > 0.0].max(initial=0.0))
