"""A straggler is slow step after step; a rank that was slow once is none."""

import numpy as np

from pipeswift.cost import Costs
from pipeswift.report.straggler import straggler
from pipeswift.schedules import build
from pipeswift.simulate import replay, varied


def step(*factors: float):
    """1F1B with 8 micro-batches, the passes of each rank longer by its factor."""
    by_stage = np.repeat(np.array(factors)[:, None], 8, axis=1)
    return (replay(build("1f1b", len(factors), 8), varied(Costs.uniform(len(factors)), by_stage)),)


def test_the_slow_rank_is_named_with_its_factor():
    found = straggler([step(1, 1, 1.5, 1)] * 10)
    assert found == (2, 1.5, None)
    assert str(found).startswith("Rank 2 is a straggler: its passes take 1.50 times as long")


def test_once_is_not_always():
    assert straggler([step(1, 1, 1.5, 1)] * 7 + [step(1, 1, 1, 1)] * 3) is None


def test_equal_ranks_have_none():
    assert straggler([step(1, 1, 1.1, 1)] * 10) is None


def test_one_rank_has_nobody_to_be_slower_than():
    assert straggler([step(1)]) is None
    assert straggler([]) is None


def test_of_several_replicas_it_is_one_rank_of_one():
    found = straggler([(*step(1, 1), *step(1.5, 1))] * 10)
    assert found == (0, 1.5, 1)
    assert str(found).startswith("Rank 0 of replica 1 is a straggler")
