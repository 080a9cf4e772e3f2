"""Lower bounds: what no order can beat, from work, warm-up and drain, in closed form."""

from __future__ import annotations

import numpy as np

from pipeswift.search.problem import Problem

F, I, W = 0, 1, 2  # noqa: E741


def lower_bound(problem: Problem) -> float:
    """Seconds that the objective of `problem` cannot go below; the largest of three kinds of bound.

    Work: a rank's span holds all its passes. Warm-up and drain: before its first I a rank runs no more forwards than
    memory allows, and between its last F and last I no more than what memory let it leave; the rest of those round
    trips it idles. Path: the first F travels to another rank, which runs all its F and I, and the last I comes back.
    For the makespan, the way to a rank counts too, and the way from its last I to the first stage.
    """
    spans = _own_spans(problem)
    if problem.chunks == 1:
        through = _through_spans(problem)
        if problem.objective == "span":
            return float(max(spans.max(), through.max()))
        spans = np.maximum(spans, through.diagonal())
        return float(max((_head(problem) + spans).max(), through[0].max()))
    return float((_head(problem) + spans).max() if problem.objective == "makespan" else spans.max())


def _own_spans(problem: Problem) -> np.ndarray:
    """For each rank, its work and the idle time that warm-up and drain force on it."""
    return problem.work + np.array([_warm_up_idle(problem, r) + _drain_idle(problem, r) for r in range(problem.ranks)])


def _shortest(problem: Problem) -> np.ndarray:
    """The shortest F, I and W of each stage over micro-batches, shape (3, stages)."""
    return problem.seconds[: W + 1].min(axis=2)


def _held(problem: Problem, rank: int) -> np.ndarray:
    return np.flatnonzero(problem.rank_of == rank)


def _head(problem: Problem) -> np.ndarray:
    """Seconds before each rank's first F can start."""
    arrives = np.concatenate([[0.0], np.cumsum(_shortest(problem)[F] + problem.delay[F])[:-1]])
    return np.array([arrives[_held(problem, rank)[0]] for rank in range(problem.ranks)])


def round_trip(problem: Problem, source: int, target: int) -> float:
    """Seconds from the end of F of stage `source` to the start of I of stage `target`, all of one micro-batch."""
    forward, backward = _shortest(problem)[:2]
    return float(
        forward[source + 1 :].sum()
        + problem.delay[F, source:].sum()
        + backward[target + 1 :].sum()
        + problem.delay[I, target + 1 :].sum()
    )


def _warm_up_idle(problem: Problem, rank: int) -> float:
    """Idle seconds between the end of a rank's first F and the start of its first I."""
    held = _held(problem, rank)
    passes = np.sort(problem.seconds[F, held].ravel())[::-1]
    fitting = _number_of(problem.slack_limit, problem.memory[F, held].min(), len(passes))
    # A rank's first I is that of its last stage, and its first F is not among the passes that may fill the time.
    first = problem.seconds[F, held[0], 0]
    return max(0.0, round_trip(problem, int(held[0]), int(held[-1])) + first - passes[:fitting].sum())


def _drain_idle(problem: Problem, rank: int) -> float:
    """Idle seconds between the end of a rank's last F and the start of its last I, beyond the warm-up's.

    One chunk only, and only where memory keeps the last F until after the first I, so that no time counts twice.
    """
    held = _held(problem, rank)
    if problem.chunks > 1:
        return 0.0
    stage = int(held[0])
    if not _comes_late(problem, stage):
        return 0.0
    seconds = problem.seconds[:3, stage].max(axis=1)
    most = max(left * (seconds[I] + seconds[W]) + owed * seconds[W] for left, owed in _leftovers(problem, stage))
    return max(0.0, round_trip(problem, stage, stage) - most)


def _comes_late(problem: Problem, stage: int) -> bool:
    """Whether memory keeps a stage's last F until after its first I."""
    m = problem.microbatches
    return _number_of(problem.slack_limit, problem.memory[F, stage], m) < m


def _leftovers(problem: Problem, stage: int) -> list[tuple[int, int]]:
    """The largest (micro-batches without I, further ones without W) when the last F of a stage starts."""
    forward, input_gradient, _ = problem.memory[:, stage]
    others = problem.microbatches - 1
    room = problem.slack_limit - max(forward, 0.0)
    found = []
    for left in range(_number_of(room, forward, others) + 1):
        owed = _number_of(room - left * forward, forward + input_gradient, others - left)
        found.append((left, owed))
    return found


def _number_of(room: float, size: float, most: int) -> int:
    """How many things of one size fit into `room`, and no more than `most`."""
    if size <= 0 or not np.isfinite(room):
        return most
    return min(most, max(int(room // size), 0))


def _through_spans(problem: Problem) -> np.ndarray:
    """[r, s]: the span of rank r, bounded by what rank s >= r runs between its first F and last I; 0 below."""
    p = problem.ranks
    forward, backward, weight = _shortest(problem)
    there = np.concatenate([[0.0], np.cumsum(forward + problem.delay[F])[:-1]])
    back = np.concatenate([[0.0], np.cumsum(backward[:-1] + problem.delay[I, 1:])])
    spans = np.zeros((p, p))
    for s in range(p):
        busy = _first_forward_to_last_gradient(problem, s)
        for r in range(s + 1):
            spans[r, s] = there[s] - there[r] + busy + back[s] - back[r] + weight[r]
    return spans


def _first_forward_to_last_gradient(problem: Problem, stage: int) -> float:
    """Seconds that a rank takes, at least, from the start of its first F to the end of its last I; one chunk."""
    m = problem.microbatches
    forward, backward, weight = problem.seconds[:3, stage]
    quickest = weight.min()
    trip = round_trip(problem, stage, stage)
    busy = forward.sum() + backward.sum() + _warm_up_idle(problem, stage)
    late = _comes_late(problem, stage)
    found = []
    for left, owed in _leftovers(problem, stage):
        by_then = max(m - 1 - left - owed, 0) * quickest
        idle = max(0.0, trip - left * backward.max()) if late else 0.0
        found.append(busy + by_then + idle)
    return min(found)
