"""The compiled loop of a local search over orders: moves of single passes, judged by the replay.

Importing it imports Numba; its machine code is cached on disk.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeswift.simulate.kernel import play

F, I, W = 0, 1, 2  # noqa: E741
SPREAD = 0.05  # how much the mean over ranks counts beside the longest: the way there is downhill for all


@njit(cache=True)
def anneal(orders, dependencies, links, samples, memory, limit, by_span, reach, heat, seed, tries):
    """Move passes within the ranks of `orders`, in place, and leave the best orders found there; returns their value.

    samples: seconds as in Costs, of several draws; the value is the mean over them. reach: how far a pass moves at
    most, short ways more often. heat: seconds by which a move may be worse, at first; it falls to 0 over `tries`.
    """
    np.random.seed(seed)
    rows, _, offsets, _ = orders
    scratch = np.empty(dependencies[0].size * samples.shape[3] + 1), np.empty(len(rows)), np.empty(len(rows))
    current, value = _value(orders, dependencies, links, samples, by_span, scratch)
    best, best_rows = value, rows.copy()
    best_score = current
    ranks = len(offsets) - 1
    for turn in range(tries):
        rank = np.random.randint(ranks)
        first, stop = np.int64(offsets[rank]), np.int64(offsets[rank + 1])
        source = first + np.random.randint(stop - first)
        step = int(reach ** np.random.random())
        target = source + step if np.random.random() < 0.5 else source - step
        if target < first or target >= stop:
            continue
        _move(rows, source, target)
        if not _fits(rows, first, max(source, target) + 1, memory, limit):
            _move(rows, target, source)
            continue
        score, value = _value(orders, dependencies, links, samples, by_span, scratch)
        if score <= current + heat * (1.0 - turn / tries) * np.random.random():
            current = score
            if score < best_score:
                best, best_score = value, score
                best_rows[:] = rows
        else:
            _move(rows, target, source)
    rows[:] = best_rows
    return best


@njit(cache=True)
def _value(orders, dependencies, links, samples, by_span, scratch):
    """(value with the spread in it, value); infinite for orders that do not finish."""
    arrival, start, end = scratch
    offsets = orders[2]
    ranks = len(offsets) - 1
    apart = np.full((1, 1), np.nan)  # nothing is woven, so no pair has a cost
    longest = mean = 0.0
    for draw in range(len(samples)):
        arrival[:] = np.nan
        reached = play(orders, dependencies, links, samples[draw], apart, arrival, start, end)
        most = 0.0
        for rank in range(ranks):
            if reached[rank] != offsets[rank + 1]:
                return np.inf, np.inf
            span = end[offsets[rank + 1] - np.uint64(1)] - (start[offsets[rank]] if by_span else 0.0)
            most = max(most, span)
            mean += span / ranks
        longest += most
    longest, mean = longest / len(samples), mean / len(samples)
    return longest + SPREAD * mean, longest


@njit(cache=True)
def _move(rows, source, target):
    """Move a pass; with others of its stage and op on the way it swaps micro-batches, which thus stay in order."""
    stage, op, microbatch = rows[source, 0], rows[source, 1], rows[source, 2]
    step = 1 if source < target else -1
    for at in range(source, target, step):
        other = rows[at + step, 2]
        if rows[at + step, 0] == stage and rows[at + step, 1] == op:
            other, microbatch = microbatch, other
        rows[at, 0], rows[at, 1], rows[at, 2] = rows[at + step, 0], rows[at + step, 1], other
    rows[target, 0], rows[target, 1], rows[target, 2] = stage, op, microbatch


@njit(cache=True)
def _fits(rows, first, stop, memory, limit):
    """Whether rows first..stop of a rank keep the memory limit."""
    level = 0.0
    for at in range(first, stop):
        change = memory[rows[at, 1], rows[at, 0]]
        if level + max(change, 0.0) > limit:
            return False
        level += change
    return True
