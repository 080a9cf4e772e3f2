"""Where a search starts: the published schedules that fit, and patterns with warm-ups of many lengths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeswift import schedules
from pipeswift.ir import F, I, Schedule, W
from pipeswift.passes import split_backward
from pipeswift.search.bound import round_trip
from pipeswift.search.packed import keeps_limit
from pipeswift.search.pattern import Pattern, in_rounds, running_ahead
from pipeswift.search.problem import Problem

WARM_STEPS = (1, 2, 3)  # forwards that a rank warms up with beyond the next rank
WARM_TRIPS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # beyond those that fill a round trip


def published(problem: Problem) -> Iterator[Schedule]:
    """The schedules on the list that have these places and keep the limit, backwards split or, as they are, whole.

    At the end, one micro-batch at a time. A search knows no Overlap.
    """
    for entry in reversed(schedules.entries()):  # the latest are mostly the best
        if not entry.flush or not (entry.any_chunks or entry.chunks == problem.chunks):
            continue
        try:
            schedule = schedules.build(entry.name, problem.ranks, problem.microbatches, problem.chunks)
        except schedules.ScheduleError:
            continue
        if schedule.routes == problem.empty.routes and not schedule.overlaps:
            forms = (schedule,) if schedule.splits_backward else (split_backward(schedule), schedule)
            yield from (form for form in forms if keeps_limit(problem, form))
    yield one_at_a_time(problem)


def one_at_a_time(problem: Problem) -> Schedule:
    """Each micro-batch goes up and down all stages before the next one starts: what needs the least memory."""

    def order(rank: int):
        held = np.flatnonzero(problem.rank_of == rank).tolist()
        for i in range(problem.microbatches):
            yield from (F(stage, i) for stage in held)
            for stage in reversed(held):
                yield from (I(stage, i), W(stage, i))

    return Schedule.one_route(
        order,
        ranks=problem.ranks,
        microbatches=problem.microbatches,
        chunks=problem.chunks,
        placement=problem.placement,
        name="one-at-a-time",
    )


def patterns(problem: Problem) -> Iterator[Pattern]:
    """Warm-ups of many lengths, then F and I in turn; with chunks, over rounds of several sizes."""
    for size in _round_sizes(problem):
        forwards, backwards = in_rounds(problem, size)
        for warm in _warm_ups(problem, size):
            yield running_ahead(forwards, backwards, warm)


def _round_sizes(problem: Problem) -> list[int]:
    p, m = problem.ranks, problem.microbatches
    return [1] if problem.chunks == 1 else sorted({1, min(2, m), min(max(p // 2, 1), m), min(p, m)}, reverse=True)


def _warm_ups(problem: Problem, size: int) -> list[np.ndarray]:
    """Forwards before the first input gradient, shape (ranks,), each different, none more than memory holds."""
    p, passes = problem.ranks, problem.chunks * problem.microbatches
    held = [np.flatnonzero(problem.rank_of == rank) for rank in range(p)]
    lasts = np.array([problem.seconds[0, stages].mean() for stages in held])
    trips = np.array([round_trip(problem, int(stages[0]), int(stages[-1])) for stages in held])
    grows = np.array([problem.memory[0, stages].max() for stages in held])
    fitting = np.full(p, passes)
    if np.isfinite(problem.limit):
        fitting[grows > 0] = (problem.slack_limit // grows[grows > 0]).astype(int)
    cap = np.clip(fitting, 1, passes)
    # A rank's first I is that of its last stage, after the forwards of all its stages.
    base = 1 + (problem.chunks - 1) * size
    by_trip = (base + np.floor(trips / np.maximum(lasts, 1e-300) + more).astype(int) for more in WARM_TRIPS)
    by_step = (base + step * (p - 1 - np.arange(p)) for step in WARM_STEPS)
    found = {tuple(np.minimum(cap, warm).tolist()) for warms in (by_step, by_trip) for warm in warms}
    return [np.array(warm) for warm in sorted(found)]
