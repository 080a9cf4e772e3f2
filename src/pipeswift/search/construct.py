"""Construction: decode many points of a grid, then climb from the best of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, product
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from pipeswift.search.best import Best
from pipeswift.search.candidates import patterns, published
from pipeswift.search.compiled import Compiled, Point
from pipeswift.search.dispatch import dispatched
from pipeswift.search.packed import pack, unpack
from pipeswift.search.pattern import Pattern, pattern_of
from pipeswift.search.problem import Problem

SCOUTS = ((1.0, np.inf), (0.5, np.inf), (0.0, 0.0), (1.0, 1.0))  # (fit, budget) that every pattern is tried with
FITS = (1.0, 0.75, 0.5, 0.25, 0.0)
BUDGETS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, np.inf)  # in mean weight gradients, as everywhere here
DISPATCHING = 400  # an effort of fewer tries takes less time than dispatching does
KEPT = 4  # patterns that get the whole grid of fits and budgets


class Scored(NamedTuple):
    """A point, and what its orders are worth."""

    seconds: float
    point: Point


_seconds = attrgetter("seconds")


def construct(compiled: Compiled, best: Best, share: float) -> list[Point]:
    """Offer the published schedules and what a grid decodes to; the best point of each of the best patterns.

    The list is empty where no pattern keeps the limit. At most that share of the search's time goes into it.
    """
    problem = compiled.problem
    dispatches = problem.chunks > 1 and best.affords(DISPATCHING)
    starts = list(chain(published(problem), dispatched(problem) if dispatches else ()))
    for schedule in starts:
        best.offer(schedule, schedule.name)
    scouted: list[Scored] = []
    for pattern in chain(patterns(problem), (pattern_of(unpack(problem, pack(start))) for start in starts)):
        if scouted and not best.left(share):
            break
        scouted.append(_best_of(compiled, best, [_point(problem, pattern, *rule) for rule in SCOUTS]))
    refined: list[Scored] = []
    for scout in sorted(scouted, key=_seconds)[:KEPT]:
        grid = (_point(problem, scout.point.pattern, *rule) for rule in product(FITS, BUDGETS))
        in_time = (point for point in grid if best.left(share))
        refined.append(_best_of(compiled, best, chain([scout.point], in_time)))
    return [found.point for found in sorted(refined, key=_seconds) if np.isfinite(found.seconds)]


def climb(compiled: Compiled, best: Best, point: Point, share: float, seed: int) -> Point:
    """Change a few numbers of the point at a time and keep what is no worse, until the share of the time is used up."""
    random = np.random.default_rng(seed)
    at = _best_of(compiled, best, [point], "climb")
    while best.left(share):
        found = _best_of(compiled, best, [_changed(compiled.problem, at.point, random)], "climb")
        if found.seconds <= at.seconds:
            at = found
    return at.point


def _best_of(compiled: Compiled, best: Best, points: Iterable[Point], method: str = "construct") -> Scored:
    """The best of some points, at least one; each is offered."""
    found = []
    for point in points:
        best.spend(1)
        seconds, orders = compiled.decode(point)
        if seconds < best.value:
            best.offer(unpack(compiled.problem, orders), method)
        found.append(Scored(seconds, point))
    return min(found, key=_seconds)


def _point(problem: Problem, pattern: Pattern, fit: float, budget: float) -> Point:
    p = problem.ranks
    seconds = budget * _weight(problem) if budget else 0.0
    return Point(pattern, np.zeros(p, dtype=np.int64), np.full(p, fit), np.full(p, seconds))


def _changed(problem: Problem, point: Point, random: np.random.Generator) -> Point:
    shift, fit, budget = point.shift.copy(), point.fit.copy(), point.budget.copy()
    for _ in range(random.integers(1, 4)):
        rank = random.integers(problem.ranks)
        match random.integers(3):
            case 0:
                shift[rank] += random.integers(-1, 2)
            case 1:
                fit[rank] = random.random()
            case _:
                budget[rank] = 4 * random.random() * _weight(problem)
    return Point(point.pattern, shift, fit, budget)


def _weight(problem: Problem) -> float:
    """The mean seconds of a W."""
    return float(problem.seconds[2].mean())
