import pytest

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.report import summarize
from pipeswift.simulate import replay
from tests.report.timelines import timeline


def summary(name, p, m, chunks=1, **seconds):
    schedule = schedules.build(name, p, m, chunks)
    return summarize(schedule, replay(schedule, Costs.uniform(schedule.num_stages, chunks=chunks, **seconds)))


def test_one_f_one_b_in_figures():
    found = summary("1f1b", 4, 8)
    assert (found.schedule, found.pp, found.microbatches, found.chunks) == ("1f1b", 4, 8, 1)
    assert found.makespan == found.longest_span == 33
    assert found.bubble_rate_span == found.bubble_rate_makespan == pytest.approx(3 / 11)
    assert found.peak_activations == (4, 3, 2, 1)


def test_the_two_bubble_rates_differ_where_no_rank_is_there_from_start_to_end():
    trace = timeline((0, "0F0", 0, 1), (0, "0B0", 2, 3), (1, "1F0", 1, 2), (1, "1B0", 3, 4))
    found = summarize(schedules.build("1f1b", 2, 1), trace)
    assert (found.longest_span, found.makespan) == (3, 4)
    assert found.bubble_rate_span == pytest.approx(1 / 3)
    assert found.bubble_rate_makespan == pytest.approx(1 / 2)


def test_thirds_of_a_share_add_up_to_whole_ones():
    assert summary("interleaved-1f1b", 2, 2, chunks=3).peak_activations == (2.0, 2.0)
