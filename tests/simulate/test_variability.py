"""Swings: what the factors are, and the bound that no order beats."""

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.schedules import build
from pipeswift.simulate import PATTERNS, VariabilityError, factors, replay, varied, work_bound
from pipeswift.trace import makespan


@pytest.mark.parametrize("pattern", ["iid", "ar1"])
def test_a_factor_depends_on_seed_stage_and_micro_batch_alone(pattern):
    assert np.array_equal(factors(7, 3, 8, 0.4, pattern), factors(7, 5, 20, 0.4, pattern)[:3, :8])
    assert not np.array_equal(factors(7, 3, 8, 0.4, pattern), factors(8, 3, 8, 0.4, pattern))


def test_log_normal_factors_have_mean_one_and_the_given_sigma():
    drawn = np.log(factors(0, 50, 2000, 0.4))
    assert drawn.std() == pytest.approx(0.4, rel=0.01)
    assert np.exp(drawn).mean() == pytest.approx(1.0, rel=0.01)


def test_ar1_goes_on_from_one_micro_batch_to_the_next():
    logs = np.log(factors(0, 50, 2000, 0.4, "ar1"))
    assert np.corrcoef(logs[:, :-1].ravel(), logs[:, 1:].ravel())[0, 1] == pytest.approx(0.9, abs=0.01)


def test_a_burst_slows_two_stages_for_a_quarter_of_the_micro_batches():
    drawn = factors(3, 6, 16, 0.4, "burst")
    assert np.unique(drawn).tolist() == [1.0, 1.8]
    assert sorted((drawn > 1).sum(axis=1).tolist()) == [0, 0, 0, 0, 4, 4]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_swing_all_factors_are_one(pattern):
    assert (factors(0, 4, 8, 0.0, pattern) == 1.0).all()


def test_the_bound_is_the_last_ranks_head_and_work_when_all_are_equal():
    costs = Costs.uniform(8, W=0.8, comm=0.02)
    assert work_bound(build("zb-h1", 8, 32), costs) == pytest.approx(7 * 1.02 + 32 * 2.8)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "p", "m"), [("1f1b", 4, 8), ("interleaved-1f1b", 4, 8), ("zb-v", 4, 8)])
def test_no_order_beats_the_bound(name, p, m, seed):
    schedule = build(name, p, m)
    costs = varied(Costs.uniform(schedule.num_stages, comm=0.1), factors(seed, schedule.num_stages, m, 0.8))
    assert makespan(replay(schedule, costs)) >= work_bound(schedule, costs)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(VariabilityError, match=r"--variability must be from 0 to 3: got -1\. Use 0\.4"):
        factors(0, 2, 2, -1.0)
    with pytest.raises(VariabilityError, match=r"--pattern must be one of iid, ar1, burst: got uniform"):
        factors(0, 2, 2, 0.1, "uniform")
