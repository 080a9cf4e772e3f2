"""The monitor: what passes are expected to take, what neighbours tell, and when the times count as steady."""

from math import inf, isnan

import pytest

from pipeswift.ir import B, F, I, W
from pipeswift.policy import Alarm, Calibration, Monitor, Summary
from pipeswift.policy.monitor import LONG, SHORT, Window

STEADY = Calibration({}, {0: 0.0})
FIRST = F(0, 0)


def summary(action=FIRST, time=0.0, until=1.0, swing=0.0, depth=0, rank=0) -> Summary:
    return Summary(rank, action, time, until, swing, depth)


def window(*passes: tuple[float, float]) -> Window:
    made = Window()
    for seconds, forward in passes:
        made.add(seconds, forward)
    return made


class TestWindow:
    def test_holds_the_last_few_passes(self):
        assert window((9.0, 9.0), *[(0.1, 0.1)] * 2 * LONG).mean == pytest.approx(0.1)

    @pytest.mark.parametrize(("seconds", "size"), [(0.001, SHORT), (0.1, SHORT), (0.3, 7), (1.0, LONG), (30.0, LONG)])
    def test_is_longer_for_longer_passes(self, seconds, size):
        assert window((seconds, seconds)).size == size

    def test_a_pass_in_proportion_to_its_micro_batch_s_forward_is_expected_so(self):
        assert window((2.0, 1.0), (6.0, 3.0)).expected(forward=2.0) == pytest.approx(4.0)

    def test_one_that_has_nothing_to_do_with_it_is_expected_to_be_the_mean(self):
        assert window((2.0, 1.0), (2.0, 3.0), (2.0, 5.0)).expected(forward=9.0) == 2.0

    def test_without_the_forward_it_is_the_mean(self):
        assert window((2.0, 1.0), (6.0, 3.0)).expected(forward=float("nan")) == 4.0


class TestExpected:
    def test_nothing_is_known_at_first(self):
        assert isnan(Monitor(0).expected(F(0, 0)))

    def test_the_calibration_says_what_no_pass_has_said_yet(self):
        assert Monitor(0, Calibration({F(0, 0)[:2]: 0.7}, {})).expected(F(0, 0)) == 0.7

    def test_the_first_backward_is_guessed_from_the_forward(self):
        monitor = Monitor(0)
        monitor.ended(F(0, 0), 3.0)
        assert [monitor.expected(make(0, 0)) for make in (I, W, B)] == [3.0, 3.0, 6.0]

    def test_a_slow_micro_batch_s_backward_is_expected_to_be_slow(self):
        monitor = Monitor(0)
        for i, seconds in enumerate((1.0, 3.0, 2.0)):
            monitor.ended(F(0, i), seconds)
        monitor.ended(I(0, 0), 1.5)
        assert monitor.expected(I(0, 1)) == pytest.approx(4.5)

    def test_a_new_step_knows_the_means_and_not_the_micro_batches(self):
        monitor = Monitor(0)
        monitor.ended(F(0, 0), 1.0)
        monitor.ended(F(0, 1), 3.0)
        monitor.begin_step()
        assert monitor.expected(F(0, 0)) == 2.0
        assert isnan(monitor.expected(I(0, 0)))

    def test_the_unit_is_a_mean_pass_without_w(self):
        monitor = Monitor(0)
        for action, seconds in ((F(0, 0), 1.0), (I(0, 0), 2.0), (W(0, 0), 9.0)):
            monitor.ended(action, seconds)
        assert monitor.unit == 1.5


class TestHearsay:
    def test_an_end_is_known_while_the_teller_is_at_it(self):
        monitor = Monitor(1)
        monitor.hear(summary(F(0, 3), time=10.0, until=12.0), now=10.0)
        assert monitor.end_of(0, 0, (0,), 3) == 12.0
        assert monitor.end_of(0, 0, (0,), 4) == monitor.end_of(0, 0, (1, 3), 3) == monitor.end_of(2, 0, (0,), 3) == inf

    def test_the_fastest_news_tells_how_clocks_differ(self):
        monitor = Monitor(1)
        monitor.hear(summary(time=100.0), now=7.5)  # half a second under way, on a clock that is 93 ahead
        monitor.hear(summary(time=101.0), now=8.0)
        monitor.hear(summary(time=102.0, until=103.0), now=12.0)  # this one was late
        assert monitor.end_of(0, 0, (0,), 0) == 10.0

    def test_a_teller_that_cannot_know_tells_nothing(self):
        told = Monitor(0).summary(F(0, 0), now=5.0, depth=0)
        monitor = Monitor(1)
        monitor.hear(told, now=5.0)
        assert monitor.end_of(0, 0, (0,), 0) == inf

    def test_a_queue_is_deep_when_it_was_so_lately_every_time(self):
        monitor, seen = Monitor(0), []
        for time, depth in enumerate((2, 3, 0, 4, 4, 4)):
            monitor.hear(summary(rank=1, time=float(time), depth=depth), float(time))
            seen.append(monitor.depth(1))
        assert seen == [2, 2, 0, 0, 0, 4]


class TestSteady:
    def test_not_without_a_calibration_and_not_after_one_that_swings(self):
        assert not Monitor(0).steady
        assert not Monitor(0, Calibration({}, {0: 0.0, 1: 0.3})).steady
        assert Monitor(0, STEADY).steady

    def test_windows_in_a_row_have_to_agree(self):
        monitor, seen = Monitor(0, STEADY), []
        for i, seconds in enumerate([1.0] * SHORT + [2.0] * 6):
            monitor.ended(F(0, i), seconds)
            seen.append(monitor.steady)
        assert seen == [True] * (SHORT + Alarm().windows - 1) + [False] * (7 - Alarm().windows)

    def test_equal_times_in_a_row_calm_it_again(self):
        monitor = Monitor(0, STEADY)
        for i, seconds in enumerate([1.0] * SHORT + [2.0] * 2 * LONG):
            monitor.ended(F(0, i), seconds)
        assert monitor.steady

    def test_a_neighbour_s_swing_counts(self):
        monitor = Monitor(0, STEADY)
        for i in range(2 * SHORT):
            monitor.hear(summary(rank=1, swing=0.5), now=0.0)
            monitor.ended(F(0, i), 1.0)
        assert not monitor.steady

    def test_a_step_without_a_swing_is_as_good_as_a_calibration_and_one_with_a_swing_undoes_it(self):
        monitor, seen = Monitor(0), []
        for step in ([1.0] * SHORT, [1.0] * SHORT, [1.0, 3.0] * SHORT, *[[1.0] * 2 * LONG] * 3):
            monitor.begin_step()
            for i, seconds in enumerate(step):
                monitor.ended(F(0, i), seconds)
            seen.append(monitor.steady)
        assert seen == [False, True, False, False, False, True]
