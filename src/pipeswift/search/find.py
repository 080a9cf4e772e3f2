"""The search itself: construct, climb, anneal, solve, until the best is proved or the time is up."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, cycle, product

import numpy as np

from pipeswift.cost import Costs
from pipeswift.ir import Placement, Schedule, loop
from pipeswift.search.best import Best, Effort, Progress
from pipeswift.search.bound import lower_bound
from pipeswift.search.candidates import one_at_a_time
from pipeswift.search.compiled import Compiled
from pipeswift.search.construct import climb, construct
from pipeswift.search.exact import solve
from pipeswift.search.interrupt import noticed
from pipeswift.search.packed import keeps_limit, pack, unpack
from pipeswift.search.problem import Objective, Problem, SearchError

SOLVABLE = 75  # passes of a problem for each second of the limit, beyond which the solver would only be late
CONSTRUCTING, CLIMBING, ANNEALING = 0.25, 0.15, 0.6  # shares of the effort; the last one ends where the solver begins
CLIMBS = 3  # starts of a climb
HEATS = (0.02, 0.1, 0.0)  # of the annealing, in mean weight gradients
REACHES = (30, 8)  # passes
ROUND = 2 * 10**7  # passes that one round of annealing replays
FEWEST_TRIES = 50


@dataclass(frozen=True)
class Found:
    """What a search has come to.

    value: seconds of the objective; no order of F, I and W is below lower_bound. gap: (value - lower_bound) / value.
    optimal: whether the gap is closed. method: what found the schedule: a published schedule's name, construct, climb,
    anneal or solve. seconds: how long the search took.
    """

    schedule: Schedule
    value: float
    lower_bound: float
    gap: float
    optimal: bool
    method: str
    seconds: float


def search(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    placement: Placement = loop,
    memory_limit: float | None = None,
    objective: Objective = "span",
    time_limit: float = 8.0,
    work_limit: int | None = None,
    variability: float = 0.0,
    workers: int | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Found:
    """The best order of F, I and W for these costs that no rank's memory forbids, and how far from the best it can be.

    objective: the longest span, or the makespan (as in `trace`). placement: where the `ranks * chunks` stages are.
    memory_limit: the most that a rank may hold, in the unit of `costs.memory`, which may count activations or bytes.
    time_limit: seconds; a search ends earlier when the best is proved, or, with the best so far, on Ctrl-C.
    work_limit: so many orders to try instead, and no solver: the same answer every time and everywhere, or, on Ctrl-C,
        none (KeyboardInterrupt).
    variability: above 0, the objective is the mean over seeded draws in which the seconds of each (stage, micro-batch)
        vary by a log-normal factor of mean 1 and this sigma.
    workers: threads of the solver; all cores by default. watch: told whenever something better is found.

    Micro-batches stay in order within each (stage, op). The schedule is never worse than a published one that has the
    placement and keeps the limit. The idea of filling gaps with W, under a memory limit, is that of Qi et al. 2024,
    Zero Bubble Pipeline Parallelism, sec. 3.1 and appendix; the rest is our own.
    Raises Infeasible when no order keeps the limit, SearchError for other settings that do not fit.
    """
    limit = float("inf") if memory_limit is None else float(memory_limit)
    problem = Problem(costs, ranks, microbatches, chunks, placement, limit, objective, variability)
    best = Best(problem, _bound(problem), _effort(time_limit, work_limit), watch)
    small = 3 * problem.stages * problem.microbatches <= SOLVABLE * time_limit
    solving = small and not variability and work_limit is None
    with noticed() as best.stopped:
        _search(problem, best, solving, workers or os.cpu_count() or 1)
    if work_limit is not None and best.stopped():
        raise KeyboardInterrupt
    return _found(best)


def _effort(time_limit: float, work_limit: int | None) -> Effort:
    for setting, value in (("time_limit", time_limit), ("work_limit", work_limit)):
        if value is not None and not value > 0:
            raise SearchError(f"{setting} must be above 0: got {value:g}. Use 10, say.")
    return Effort(time_limit, np.inf) if work_limit is None else Effort(np.inf, work_limit)


def _bound(problem: Problem) -> float:
    """A mean of bounds bounds the mean."""
    return float(np.mean([lower_bound(replace(problem, costs=costs, variability=0.0)) for costs in problem.draws]))


def _search(problem: Problem, best: Best, solving: bool, workers: int) -> None:
    compiled = Compiled(problem)
    points = construct(compiled, best, share=CONSTRUCTING)
    for number, point in enumerate(points[:CLIMBS], 1):
        climb(compiled, best, point, CONSTRUCTING + CLIMBING * number / CLIMBS, seed=number)
    _anneal(compiled, best, share=ANNEALING if solving else 1.0)
    if solving and best.left():
        _solve(problem, best, workers)


def _anneal(compiled: Compiled, best: Best, share: float) -> None:
    """Rounds of annealing, each from the best so far."""
    problem = compiled.problem
    round_ = max(FEWEST_TRIES, ROUND // (3 * problem.stages * problem.microbatches * len(problem.draws)))
    settings = cycle(product(REACHES, HEATS))
    for seed in count():
        if not best.left(share) or best.schedule is None:
            break
        reach, heat = next(settings)
        orders = pack(best.schedule)
        tries = best.spend(round_)
        found = compiled.anneal(orders, reach=reach, heat=heat * problem.seconds[2].mean(), seed=seed, tries=tries)
        if found < best.value:
            best.offer(unpack(problem, orders), "anneal")


def _solve(problem: Problem, best: Best, workers: int) -> None:
    hint = None if best.schedule is None else unpack(problem, pack(best.schedule))
    if hint is None or not keeps_limit(problem, hint):  # a published one with whole backwards may need less
        hint = one_at_a_time(problem)
    schedule, bound = solve(problem, hint, best.bound, seconds=best.left(), workers=workers)
    if schedule is not None:
        best.offer(schedule, "solve")
    best.raise_bound(bound)


def _found(best: Best) -> Found:
    assert best.schedule is not None  # one micro-batch at a time fits wherever anything does
    settings = {"method": best.method, "chunks": best.problem.chunks}
    schedule = replace(best.schedule, name="searched", options=settings)
    bound = min(best.bound, best.value)
    gap = (best.value - bound) / best.value if best.value else 0.0
    optimal = best.proved and schedule.splits_backward
    return Found(schedule, best.value, bound, 0.0 if optimal else gap, optimal, best.method, best.elapsed)
