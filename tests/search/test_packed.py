import numpy as np
import pytest

from pipeswift.passes import split_backward
from pipeswift.schedules import build, entries
from pipeswift.search.packed import keeps_limit, pack, peaks, unpack, value
from pipeswift.simulate import replay
from pipeswift.trace import peak_memory
from tests.search.problems import problem


def test_packing_and_back():
    given = problem(3, 4, (1, 1, 1, 0))
    assert unpack(given, pack(build("1f1b", 3, 4))).orders == split_backward(build("1f1b", 3, 4)).orders


@pytest.mark.parametrize("name", [entry.name for entry in entries()])
@pytest.mark.parametrize("memory", [None, (5, -3, -2), (1, 1, -2)])
def test_peaks_are_those_of_the_replay(name, memory):
    schedule = build(name, 4, 8)
    given = problem(4, 8, (3, 4, 2, 0.5), memory=memory, chunks=schedule.chunks)
    expected = peak_memory(replay(schedule, given.costs), given.costs.memory)
    assert peaks(schedule, given.costs.memory) == pytest.approx(expected)


def test_a_limit_is_kept_up_to_rounding():
    thirds = problem(2, 4, (1, 1, 1, 0), memory=(1 / 3, 0, -1 / 3), limit=2 / 3)
    assert keeps_limit(thirds, build("1f1b", 2, 4))
    assert not keeps_limit(thirds, build("gpipe", 2, 4))


def test_orders_that_cannot_finish_are_worth_nothing():
    given = problem(2, 2, (1, 1, 1, 0))
    orders = pack(build("1f1b", 2, 2))
    assert value(given, unpack(given, orders[:, ::-1])) == np.inf
