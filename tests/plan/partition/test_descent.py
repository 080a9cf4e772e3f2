"""The local search: never worse, and within limits."""

import numpy as np

from pipeswift.plan.partition import Layers, Machine, Problem, Stage
from pipeswift.plan.partition.descent import level, speed_up
from pipeswift.plan.partition.partition import excess, price
from pipeswift.plan.partition.pricing import Pricing


def test_never_slower_and_within_memory():
    random = np.random.default_rng(1)
    for _ in range(20):
        layers = Layers.of(random.uniform(1, 3, 20), state_bytes=1.0)
        problem = Problem(layers, Machine.of(3, memory=7.0), rank_of=(0, 1, 2, 2, 1, 0), apart=frozenset({2}))
        start = [Stage(0, 3, 1), Stage(3, 7, 1), Stage(7, 10, 1), Stage(10, 14, 1), Stage(14, 17, 1), Stage(17, 20, 1)]
        before = price(problem, start)
        after = price(problem, speed_up(Pricing(problem), start))
        assert after.bottleneck <= before.bottleneck
        assert excess(problem, after).max() <= 1
        assert 3 in {stage.end for stage in after.stages}


def test_stages_become_alike_and_ranks_no_slower():
    problem = Problem(Layers.of([1.0] * 8), Machine.of(2), rank_of=(0, 1, 0, 1))
    start = [Stage(0, 1, 1), Stage(1, 2, 1), Stage(2, 5, 1), Stage(5, 8, 1)]
    assert [stage.end for stage in level(Pricing(problem), start)] == [2, 4, 6, 8]
