"""Patterns: in which order a rank takes its forwards and its input gradients, and how far the former run ahead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeswift.ir import Op, Schedule
from pipeswift.search.problem import Problem


class Pattern(NamedTuple):
    """Everything about an order but the places of its weight gradients; arrays of shape (ranks, chunks * microbatches).

    forwards, backwards: the F and the I of a rank in their order, each as stage * microbatches + microbatch.
    ahead: how many forwards of the rank come before each of its input gradients, if memory allows.
    least: how many must, so that its own forward is among them.
    """

    forwards: np.ndarray
    backwards: np.ndarray
    ahead: np.ndarray
    least: np.ndarray


def in_rounds(problem: Problem, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(forwards, backwards): `size` micro-batches at a time go through a rank's stages, upwards and then downwards.

    With one chunk there is one order whatever the size; it is by micro-batch.
    """
    m = problem.microbatches
    rounds = [np.arange(first, min(first + size, m)) for first in range(0, m, size)]

    def codes(stages: np.ndarray) -> np.ndarray:
        return np.concatenate([stage * m + group for group in rounds for stage in stages])

    held = [np.flatnonzero(problem.rank_of == rank) for rank in range(problem.ranks)]
    return np.array([codes(stages) for stages in held]), np.array([codes(stages[::-1]) for stages in held])


def running_ahead(forwards: np.ndarray, backwards: np.ndarray, warm: np.ndarray) -> Pattern:
    """The pattern that does warm[r] forwards on rank r before its first input gradient, then one of each in turn."""
    passes = forwards.shape[1]
    ahead = np.minimum(passes, warm[:, None] + np.arange(passes))
    least = _at_least(forwards, backwards)
    return Pattern(forwards, backwards, np.maximum(ahead, least), least)


def pattern_of(schedule: Schedule) -> Pattern:
    """The pattern of a schedule with one route; a B counts as the I in it."""
    m = schedule.num_microbatches
    forwards, backwards, ahead = [], [], []
    for order in schedule.orders:
        stage, op, microbatch = order.rows.T.astype(np.int64)
        backward = (op == Op.I) | (op == Op.B)
        code = stage * m + microbatch
        forwards.append(code[op == Op.F])
        backwards.append(code[backward])
        ahead.append(np.cumsum(op == Op.F)[backward])
    least = _at_least(np.array(forwards), np.array(backwards))
    return Pattern(np.array(forwards), np.array(backwards), np.array(ahead), least)


def _at_least(forwards: np.ndarray, backwards: np.ndarray) -> np.ndarray:
    place = np.empty_like(forwards)
    for row, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
        ascending = np.argsort(forward)
        place[row] = ascending[np.searchsorted(forward, backward, sorter=ascending)]
    return np.maximum.accumulate(place + 1, axis=1)
