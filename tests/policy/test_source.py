"""Unequal micro-batches enter cheap, costly, cheap."""

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.policy import source_order
from pipeswift.schedules import build
from pipeswift.simulate import replay, varied
from pipeswift.trace import makespan


def test_cheap_ones_come_first_and_last():
    costs = [5, 1, 4, 2, 3]
    assert [costs[i] for i in source_order(costs)] == [1, 3, 5, 4, 2]


@pytest.mark.parametrize("costs", [[], [1.0], [1.0, 1.0], [3, 1, 2, 2, 1, 3]])
def test_every_micro_batch_enters_once(costs):
    assert sorted(source_order(costs)) == list(range(len(costs)))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_step_is_shorter_than_in_the_order_of_the_loader(name):
    schedule = build(name, 8, 32)
    shorter = 0
    for seed in range(20):
        costs = np.random.default_rng(seed).lognormal(sigma=0.4, size=32)
        order = np.array(source_order(costs.tolist()))
        seconds = [
            makespan(replay(schedule, varied(Costs.uniform(8), np.tile(arranged, (8, 1)))))
            for arranged in (costs, costs[order])
        ]
        shorter += seconds[1] < seconds[0]
    assert shorter == 20
