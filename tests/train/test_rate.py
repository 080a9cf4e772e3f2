"""The learning rate goes up in a line and down in a half cosine."""

import pytest

from pipeswift.train.rate import corrected, learning_rate


def rates(steps, warmup, final=0.1):
    return [learning_rate(step, steps=steps, peak=1.0, warmup=warmup, final=final) for step in range(steps)]


def test_up_to_the_peak_and_down_to_the_final_share():
    assert rates(9, 4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)


def test_without_warm_up_it_starts_at_the_peak():
    assert rates(3, 0) == pytest.approx([1.0, 0.55, 0.1])


def test_a_run_shorter_than_its_warm_up_only_climbs():
    assert rates(3, 10) == pytest.approx([0.1, 0.2, 0.3])


def test_a_single_step_is_taken_at_the_peak():
    assert rates(1, 0) == rates(1, 1) == [1.0]


def test_a_stale_gradient_has_a_smaller_rate_at_first():
    assert [corrected(1.0, 3, done, over=10) for done in (0, 5, 10, 20)] == [0.25, 0.5, 1.0, 1.0]


def test_no_staleness_and_no_correction_leave_the_rate_alone():
    assert corrected(0.3, 0, 0, over=10) == corrected(0.3, 5, 0, over=0) == 0.3
