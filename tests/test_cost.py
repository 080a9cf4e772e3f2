"""Costs: equal stages, chunks that share, and memory increments."""

import numpy as np

from pipeswift.cost import Costs, activations
from pipeswift.ir import Op


def test_equal_stages_take_the_same_time():
    costs = Costs.uniform(3, F=2, I=3, W=4)
    assert costs.seconds.shape == (4, 3, 1)
    assert costs.num_stages == 3
    assert costs.seconds[:, 0, 0].tolist() == [2, 3, 4, 7]  # F, I, W, and B for both
    assert (costs.seconds == costs.seconds[:, :1]).all()


def test_a_chunk_takes_its_share_of_a_rank_s_time_and_memory():
    whole, half = Costs.uniform(4, F=2, I=3, W=4), Costs.uniform(8, F=2, I=3, W=4, chunks=2)
    assert np.array_equal(half.seconds[:, 0], whole.seconds[:, 0] / 2)
    assert np.array_equal(half.memory[:, 0], whole.memory[:, 0] / 2)


def test_links_are_pure_latency_unless_told_otherwise():
    costs = Costs.uniform(3, comm=0.5)
    assert (costs.latency, costs.bandwidth, costs.serial_channels, costs.overlap) == (0.5, float("inf"), False, None)
    assert costs.boundary_bytes.tolist() == [0, 0]
    assert Costs.uniform(1).boundary_bytes.tolist() == []


def test_an_activation_lives_from_f_to_the_end_of_b_or_w():
    assert activations(2).tolist() == [[1, 1], [0, 0], [-1, -1], [-1, -1]]
    for backward in ([Op.B], [Op.I, Op.W]):
        assert activations(1)[[Op.F, *backward]].sum() == 0


def test_memory_in_bytes():
    costs = Costs.uniform(2).with_memory(F=10, I=-6, W=-4)
    assert costs.memory.tolist() == [[10, 10], [-6, -6], [-4, -4], [-10, -10]]
    assert np.array_equal(costs.seconds, Costs.uniform(2).seconds)
