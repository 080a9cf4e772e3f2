"""The price of a partition, worked out by hand."""

import math

import numpy as np
import pytest

from pipeswift.plan.partition import Infeasible, Layers, Machine, PartitionError, Problem, Stage, evaluate

LAYERS = Layers.of(
    [1.0, 2.0, 3.0, 4.0], output_bytes=[4.0, 6.0, 8.0, 100.0], parameter_bytes=[1, 2, 3, 4], state_bytes=1.0
)


@pytest.mark.parametrize(
    ("transfers", "seconds"),
    # Boundaries take 2 * 6 / 4 = 3 and, between the hosts, 2 * 8 / 2 = 8.
    [("beside", (3.0, 8.0, 8.0)), ("within", (3.0 + 3.0, 3.0 + 3.0 + 8.0, 8.0 + 4.0))],
)
def test_transfers(transfers, seconds):
    machine = Machine.of(3, ranks_per_host=2, inside=4.0, between=2.0)
    found = evaluate(Problem(LAYERS, machine, transfers=transfers), [2, 1, 1])
    assert found.stage_seconds == found.rank_seconds == seconds
    assert found.bottleneck == max(seconds)
    assert math.isnan(found.gap)


def test_speeds_and_bytes():
    problem = Problem(
        Layers.of([2.0, 2.0], saved_bytes=[10.0, 20.0], parameter_bytes=[1.0, 2.0], state_bytes=[100.0, 200.0]),
        Machine.of(2, speeds=[1, 4]),
        in_flight=np.array([3, 1]),
        versions=np.array([3, 1]),
    )
    found = evaluate(problem, [1, 1])
    assert found.stage_seconds == (2.0, 0.5)
    assert found.stage_bytes == (3 * 1 + 100 + 3 * 10, 2 + 200 + 20)


def test_replicas_run_at_their_slowest_and_exchange_gradients():
    """Narayanan et al. 2019, sec. 3.1: max(work, 4 (m - 1) / m * weights / bandwidth) / m."""
    problem = Problem(LAYERS, Machine.of(4, speeds=[1, 1, 0.5, 1], inside=100.0), replicate=True)
    found = evaluate(problem, [2, 2], [1, 3])
    assert found.stages == (Stage(0, 2, 1), Stage(2, 4, 3))
    assert found.stage_seconds == (3.0, 7.0 / 0.5 / 3)
    assert found.rank_seconds == (3.0, *[14.0 / 3] * 3)
    slow = Problem(LAYERS, Machine.of(4, ranks_per_host=2, inside=100.0, between=0.5), replicate=True)
    assert evaluate(slow, [2, 2], [2, 2]).stage_seconds[0] == 2 * 6 / 0.5
    assert evaluate(slow, [4], [4]).stage_seconds == (4 * 3 / 4 * 10 / 0.5 / 4,)


def test_a_boundary_is_as_slow_as_the_slowest_of_its_links():
    """Micro-batches go from any replica to any: with ranks 0 | 1 2 and hosts 0 1 | 2, some go between hosts."""
    problem = Problem(LAYERS, Machine.of(3, ranks_per_host=2, inside=1e9, between=1.0), replicate=True)
    assert evaluate(problem, [2, 2], [1, 2]).stage_seconds[0] == 2 * 6 / 1.0


def test_the_stages_of_a_rank_add_up():
    problem = Problem(LAYERS, Machine.of(2, inside=4.0), rank_of=(0, 1, 1, 0))
    found = evaluate(problem, [1, 1, 1, 1])
    assert found.rank_seconds == (6.0, 6.0)  # boundaries 0 | 1 and 1 | 0: 2 * (4 + 8) / 4; none within rank 1
    assert found.rank_bytes == (1 + 1 + 4 + 1, 2 + 1 + 3 + 1)
    assert evaluate(Problem(LAYERS, Machine.of(2), rank_of=(0, 1, 1, 0)), [1, 1, 1, 1]).rank_seconds == (5.0, 5.0)


def test_a_cut_of_ones_own_that_does_not_fit():
    problem = Problem(LAYERS, Machine.of(2, memory=9.0))
    assert evaluate(problem, [3, 1]).stage_bytes == (9.0, 5.0)
    with pytest.raises(Infeasible, match="rank 1 needs 12 bytes and has 9"):
        evaluate(problem, [1, 3])
    for sizes in ([2, 1], [4, 0], [2, 1, 1]):
        with pytest.raises(PartitionError, match="layout"):
            evaluate(problem, sizes)
    with pytest.raises(PartitionError, match=r"replicas \[2, 2\] do not give 2 stages the 3 ranks"):
        evaluate(Problem(LAYERS, Machine.of(3), replicate=True), [2, 2], [2, 2])
