"""The exact solver: CP-SAT over the cuts, where the stages of a rank add up in time or in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pipeswift.plan.partition.partition import Stage
from pipeswift.plan.partition.pricing import NEAR, Pricing
from pipeswift.search.exact import interruptible

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Goal = Literal["rank", "stage", "memory"]
LARGEST = 2.0**40  # of the solver's whole numbers


class Answer(NamedTuple):
    """The best cut met, if any, a value that none can go below, and whether the solver has finished."""

    stages: list[Stage]
    bound: float
    finished: bool


def solve(pricing: Pricing, goal: Goal, *, hint: Sequence[Stage] = (), work: float = 10.0) -> Answer:
    """Minimise the slowest rank or stage within memory, or the fullest rank as a share of its memory.

    work: how much the solver may do; about seconds, but the same on any machine.
    """
    from ortools.sat.python import cp_model

    model = _Model(pricing, cp_model.CpModel(), hint)
    scale = model.minimize(goal)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = work
    solver.parameters.num_workers = 1
    with interruptible(solver):
        status = solver.solve(model.model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    cuts = [solver.value(cut) for cut in model.cuts] if found else []
    return Answer(
        [Stage(i, j, 1) for i, j in pairwise(cuts)] if found else [],
        solver.best_objective_bound / scale if found else 0.0,
        status in (cp_model.OPTIMAL, cp_model.INFEASIBLE),
    )


class _Model:
    """The cuts as variables, and prices as tables over them, in whole numbers."""

    def __init__(self, pricing: Pricing, model: cp_model.CpModel, hint: Sequence[Stage]):
        from ortools.sat.python import cp_model

        self.pricing, self.model = pricing, model
        problem = pricing.problem
        self.seats, layers = problem.stages, len(problem.layers)
        allowed = np.flatnonzero(problem.cuts)
        self.cuts = [model.new_constant(0)]
        for seat in range(1, self.seats):
            domain = allowed[(allowed >= seat) & (allowed <= layers - self.seats + seat)]
            self.cuts.append(model.new_int_var_from_domain(cp_model.Domain.from_values(domain.tolist()), ""))
        self.cuts.append(model.new_constant(layers))
        for left, right in pairwise(self.cuts):
            model.add(right >= left + 1)
        for layer in problem.apart:
            self._cut_after(layer)
        for cut, stage in zip(self.cuts, hint, strict=False):
            model.add_hint(cut, stage.first)
        self._looked_up: dict[tuple, cp_model.IntVar] = {}

    def minimize(self, goal: Goal) -> float:
        """Adds the limits and the objective. Returns how many of the objective's units make one of the price."""
        times, scale = _whole(self._tables_of_time())
        shares, per_share = _whole(self._tables_of_memory())
        value = self.model.new_int_var(0, int(LARGEST) * 8, "")
        full = [
            sum(self._between(("memory", seat), shares[seat], seat) for seat in seats)
            for seats in self._seats_by_rank()
            if np.isfinite(self.pricing.limit[seats[0]])
        ]
        loads = {"rank": self._rank_loads(times), "stage": self._stage_loads(times), "memory": full}
        for load in loads[goal]:
            self.model.add(value >= load)
        if goal != "memory":
            for load in full:
                self.model.add(load <= int(per_share * (1 + 1e-9)))
        self.model.minimize(value)
        return per_share if goal == "memory" else scale

    def _tables_of_time(self) -> np.ndarray:
        """Seconds before each cut on each seat's rank, and over each seat's left boundary; (2 * seats, cuts)."""
        cuts = np.arange(len(self.pricing.work))
        work = [self.pricing.work / speed for speed in self.pricing.speed]
        return np.stack([*work, *(self.pricing.transfer(NEAR, seat, cuts) for seat in range(self.seats))])

    def _tables_of_memory(self) -> np.ndarray:
        """What all layers before each cut would take of a seat's memory, as a share, shape (seats, cuts)."""
        cuts = np.arange(len(self.pricing.work))
        held = np.stack([self.pricing.bytes(seat, seat + 1, 0, cuts) for seat in range(self.seats)])
        return held / self.pricing.limit[:, None]

    def _rank_loads(self, times: np.ndarray) -> Iterator[cp_model.LinearExpr | int]:
        """What each rank, or each pair of ranks, has to do."""
        problem = self.pricing.problem
        pairs: dict[frozenset[int], list] = {}
        for seat in range(1, self.seats):
            pairs.setdefault(frozenset(problem.rank_of[seat - 1 : seat + 1]), []).append(self._crossing(times, seat))
        for rank, seats in enumerate(self._seats_by_rank()):
            load = sum(self._between(("work", seat), times[seat], seat) for seat in seats)
            if problem.transfers == "within":
                load += sum(sum(crossings) for pair, crossings in pairs.items() if rank in pair)
            yield load
        if problem.transfers == "beside":
            yield from map(sum, pairs.values())

    def _stage_loads(self, times: np.ndarray) -> Iterator[cp_model.LinearExpr | int]:
        within = self.pricing.problem.transfers == "within"
        crossings = [0, *(self._crossing(times, seat) for seat in range(1, self.seats)), 0]
        for seat in range(self.seats):
            load = self._between(("work", seat), times[seat], seat)
            yield load + crossings[seat] + crossings[seat + 1] if within else load
        if not within:
            yield from crossings[1:-1]

    def _crossing(self, times: np.ndarray, seat: int) -> cp_model.IntVar | int:
        return self._look_up(times[self.seats + seat], seat)

    def _between(self, name: tuple, table: np.ndarray, seat: int) -> cp_model.LinearExpr | int:
        """What lies between the two cuts of a seat's stage."""
        return self._look_up(table, seat + 1) - self._look_up(table, seat)

    def _look_up(self, table: np.ndarray, cut: int) -> cp_model.IntVar | int:
        """table[cut] as a variable; equal tables share it."""
        key = (cut, table.tobytes())
        if key not in self._looked_up:
            values = [int(value) for value in table]
            found = self.model.new_int_var(min(values), max(values), "")
            self.model.add_element(self.cuts[cut], values, found)
            self._looked_up[key] = found
        return self._looked_up[key]

    def _seats_by_rank(self) -> list[list[int]]:
        rank_of = np.array(self.pricing.problem.rank_of)
        return [np.flatnonzero(rank_of == rank).tolist() for rank in range(len(self.pricing.problem.machine))]

    def _cut_after(self, layer: int) -> None:
        chosen = []
        for cut in self.cuts[1:-1]:
            here = self.model.new_bool_var("")
            self.model.add(cut == layer + 1).only_enforce_if(here)
            chosen.append(here)
        self.model.add_exactly_one(chosen)


def _whole(tables: np.ndarray) -> tuple[np.ndarray, float]:
    """Whole numbers, and how many of their units make 1: a power of two, so that what was whole stays exact."""
    largest = float(tables.max())
    if largest == 0 or not np.isfinite(largest):
        return np.zeros(tables.shape, dtype=np.int64), 1.0
    scale = 2.0 ** np.floor(np.log2(LARGEST / largest))
    whole = np.rint(tables * scale).astype(np.int64)
    common = int(np.gcd.reduce(whole, axis=None))
    return whole // common, scale / common
