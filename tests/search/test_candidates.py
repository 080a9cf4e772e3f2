import numpy as np
import pytest

from pipeswift.ir import loop, vee
from pipeswift.search.candidates import one_at_a_time, patterns, published
from pipeswift.search.dispatch import dispatched
from pipeswift.search.packed import keeps_limit, peaks
from pipeswift.verify import verify
from tests.search.problems import problem


def names(given) -> set[str]:
    return {schedule.name for schedule in published(given)}


def test_published_schedules_have_the_places_and_keep_the_limit():
    one = (1, 1, 1, 0)
    everything = {"zb-h2", "zb-h1", "interleaved-1f1b", "1f1b", "gpipe", "naive", "one-at-a-time"}
    assert names(problem(4, 8, one)) == everything
    assert names(problem(4, 8, one, limit=4)) == {"zb-h1", "1f1b", "naive", "one-at-a-time"}
    in_v = {"memory": None, "chunks": 2, "placement": vee}
    assert names(problem(4, 8, one, **in_v)) == {"v-min", "v-half", "zb-v", "one-at-a-time"}
    assert names(problem(4, 8, one, limit=2, **in_v)) == {"v-min", "one-at-a-time"}
    assert names(problem(4, 8, one, memory=None, chunks=2)) == {"interleaved-1f1b", "one-at-a-time"}
    assert names(problem(4, 7, one, memory=None, chunks=2)) == {"one-at-a-time"}


@pytest.mark.parametrize(("placement", "chunks"), [(loop, 1), (loop, 3), (vee, 2)])
def test_one_at_a_time_needs_the_least_memory(placement, chunks):
    given = problem(3, 4, (1, 1, 1, 0), memory=None, chunks=chunks, placement=placement)
    schedule = one_at_a_time(given)
    assert verify(schedule) == []
    assert peaks(schedule, given.costs.memory) == pytest.approx(1)
    assert given.least_memory(0) == pytest.approx(1)


def test_no_warm_up_is_longer_than_memory_allows():
    for pattern in patterns(problem(4, 20, (1, 1, 1, 0.5), memory=(2, -1, -1), limit=11)):
        assert pattern.ahead[:, 0].max() <= 5
        assert (np.diff(pattern.ahead) >= 0).all()


@pytest.mark.parametrize(("placement", "chunks"), [(loop, 2), (vee, 2), (vee, 3)])
@pytest.mark.parametrize("limit", [2, 4, float("inf")])
def test_dispatching_gives_complete_schedules_within_memory(placement, chunks, limit):
    given = problem(4, 9, (5, 6, 4, 0.5), memory=None, chunks=chunks, placement=placement, limit=limit)
    found = list(dispatched(given))
    assert found
    for schedule in found:
        assert verify(schedule) == []
        assert keeps_limit(given, schedule)
