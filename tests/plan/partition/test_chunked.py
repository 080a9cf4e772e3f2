"""The exact solver: cuts of chunks, judged by trying all of them elsewhere; here, its limits and its whole numbers."""

import numpy as np
import pytest

from pipeswift.plan.partition import Layers, Machine, Problem, Stage
from pipeswift.plan.partition.chunked import LARGEST, _whole, solve
from pipeswift.plan.partition.pricing import Pricing


@pytest.mark.parametrize(("goal", "best"), [("rank", 9.0), ("stage", 5.0)])
def test_goals(goal, best):
    problem = Problem(Layers.of([4.0, 5.0, 1.0, 3.0, 4.0]), Machine.of(2), rank_of=(0, 1, 0, 1))
    found = solve(Pricing(problem), goal)
    assert (found.stages, found.bound) == ([Stage(0, 1, 1), Stage(1, 2, 1), Stage(2, 4, 1), Stage(4, 5, 1)], best)
    assert found.finished


def test_the_fullest_rank_as_a_share_of_its_memory():
    problem = Problem(Layers.of([1.0] * 6, state_bytes=1.0), Machine.of(2, memory=[2.0, 1.0]), rank_of=(0, 1, 1, 0))
    assert solve(Pricing(problem), "memory").bound == 2.0


def test_nothing_fits():
    problem = Problem(Layers.of([1.0] * 4, state_bytes=1.0), Machine.of(2, memory=1.5), rank_of=(0, 1, 0, 1))
    assert solve(Pricing(problem), "rank") == ([], 0.0, True)


@pytest.mark.parametrize("values", [[0.0, 3.0, 6.0], [0.0, 0.5, 2.25], [0.0, 0.0]])
def test_whole_numbers_stay_exact(values):
    whole, scale = _whole(np.array([values]))
    assert (whole / scale).tolist() == [values]
    assert np.abs(whole).max() <= LARGEST
