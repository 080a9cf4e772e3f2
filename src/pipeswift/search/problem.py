"""The problem that a search solves: places, seconds, links and memory, checked once and laid out in arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op, Order, Placement, Schedule
from pipeswift.simulate.tables import NONE, Dependencies, Links, dependencies, links

Objective = Literal["span", "makespan"]
OBJECTIVES: tuple[Objective, ...] = ("span", "makespan")
DRAWS, SEED = 64, 0
MOST_VARIABILITY = 3.0
ROUNDING = 1e-9  # relative; sums of shares of a unit may be off by this much


class SearchError(PipeSwiftError):
    """A search was asked for something that it does not do."""


class Infeasible(SearchError):
    """No order at all keeps the memory limit."""


@dataclass(frozen=True)
class Problem:
    """Costs on a placement of stages with one route, a memory limit, and what to minimise.

    limit: the most that a rank may hold, in the unit of `costs.memory`; infinite for none.
    variability: sigma of log-normal factors of mean 1 on the seconds of each (stage, micro-batch); if above 0, the
        objective is the mean over DRAWS seeded draws.
    """

    costs: Costs
    ranks: int
    microbatches: int
    chunks: int
    placement: Placement
    limit: float
    objective: Objective
    variability: float = 0.0

    def __post_init__(self) -> None:
        for setting, value in (("ranks", self.ranks), ("microbatches", self.microbatches), ("chunks", self.chunks)):
            if value < 1:
                raise SearchError(f"{setting} must be at least 1: got {value}. Use 1 or more.")
        if self.objective not in OBJECTIVES:
            raise SearchError(f"objective must be span or makespan: got {self.objective!r}. Use span, say.")
        if self.costs.num_stages != self.ranks * self.chunks:
            raise SearchError(
                f"costs are for {self.costs.num_stages} stages, but {self.ranks} ranks with {self.chunks} chunks make "
                f"{self.ranks * self.chunks}. Give costs for as many."
            )
        if self.costs.serial_channels:
            raise SearchError("costs.serial_channels is True: a search takes links as latency. Set it to False.")
        if not 0.0 <= self.variability <= MOST_VARIABILITY:
            raise SearchError(
                f"variability must be from 0 to {MOST_VARIABILITY:g}: got {self.variability:g}. Use 0.2, say."
            )
        if not np.isfinite(self.costs.seconds[: Op.B]).all():
            raise SearchError("costs.seconds lacks numbers for some F, I or W. Give measured ones for all passes.")
        self._check_limit()

    def _check_limit(self) -> None:
        rest = np.abs(self.memory.sum(axis=0))
        if (rest > ROUNDING * np.abs(self.memory).max(axis=0)).any():
            f, i, w = self.memory[:, np.argmax(rest)]
            raise SearchError(
                f"what F, I and W add to memory must sum to 0, or it would grow or shrink with every micro-batch: got "
                f"{f:g},{i:g},{w:g}. Use {f:g},{i:g},{-f - i:g}."
            )
        for rank in range(self.ranks):
            least = self.least_memory(rank)
            if not least <= self.slack_limit:
                raise Infeasible(
                    f"the memory limit {self.limit:g} is too low: rank {rank} needs {least:g} for a single "
                    f"micro-batch. Use {max(map(self.least_memory, range(self.ranks))):g} or more."
                )

    def least_memory(self, rank: int) -> float:
        """What one micro-batch alone needs on a rank, through all its stages and back."""
        stages = np.flatnonzero(self.rank_of == rank)
        forward, input_gradient, weight_gradient = self.memory[:, stages]
        there = np.array([forward, np.zeros(len(stages))]).T.ravel()
        back = np.array([input_gradient, weight_gradient]).T[::-1].ravel()
        changes = np.concatenate([there, back])
        before = np.concatenate([[0.0], np.cumsum(changes)[:-1]])
        return float((before + np.maximum(changes, 0.0)).max())

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def slack_limit(self) -> float:
        """The limit, plus what rounding may add."""
        return self.limit + ROUNDING * max(1.0, abs(self.limit))

    @cached_property
    def rank_of(self) -> np.ndarray:
        """int64, shape (stages,)."""
        return np.array([self.placement(stage, self.ranks) for stage in range(self.stages)])

    @cached_property
    def seconds(self) -> np.ndarray:
        """float64, shape (4, stages, microbatches)."""
        shape = (len(Op), self.stages, self.microbatches)
        return np.ascontiguousarray(np.broadcast_to(self.costs.seconds, shape), dtype=np.float64)

    @cached_property
    def draws(self) -> tuple[Costs, ...]:
        """The costs that the objective is a mean over: the given ones, or seeded variations of them."""
        if not self.variability:
            return (self.costs,)
        random = np.random.default_rng(SEED)
        shape = (DRAWS, self.stages, self.microbatches)
        factors = random.lognormal(-(self.variability**2) / 2, self.variability, shape)
        return tuple(replace(self.costs, seconds=self.seconds * factor) for factor in factors)

    @property
    def memory(self) -> np.ndarray:
        """Increments of F, I and W, shape (3, stages)."""
        return self.costs.memory[: Op.B]

    @cached_property
    def empty(self) -> Schedule:
        """The schedule without actions: where the stages are."""
        nothing = tuple(Order(np.empty((0, 3))) for _ in range(self.ranks))
        return Schedule(nothing, (tuple(self.rank_of.tolist()),), (0,) * self.microbatches, name="searched")

    @cached_property
    def links(self) -> Links:
        return links(self.empty, self.costs)

    @cached_property
    def dependencies(self) -> Dependencies:
        return dependencies(self.stages, self.microbatches)

    @cached_property
    def delay(self) -> np.ndarray:
        """Seconds from the end of F or I of a stage until its product is where it is needed, shape (2, stages)."""
        table = self.links
        on_the_way = table.receiver[0, :2] != NONE
        return np.where(on_the_way, table.transfer[0, :2] + table.latency[0, :2], 0.0)

    @property
    def work(self) -> np.ndarray:
        """Seconds of passes per rank, shape (ranks,)."""
        return np.bincount(self.rank_of, self.seconds[: Op.B].sum(axis=(0, 2)), self.ranks)
