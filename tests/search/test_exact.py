import signal

import numpy as np
import pytest

from pipeswift.schedules import build
from pipeswift.search.exact import in_ticks, solve
from pipeswift.search.packed import keeps_limit, pack, unpack, value
from pipeswift.verify import verify
from tests.search.problems import problem


@pytest.mark.parametrize(("limit", "makespan"), [(4, 283), (8, 265)])
def test_an_optimum_known_from_elsewhere(limit, makespan):
    given = problem(4, 8, (10, 11, 8, 1), limit=limit, objective="makespan")
    answer = solve(given, unpack(given, pack(build("1f1b", 4, 8))), 0.0, seconds=60)
    assert answer.schedule is not None
    assert verify(answer.schedule) == []
    assert keeps_limit(given, answer.schedule)
    assert value(given, answer.schedule) == answer.bound == makespan


@pytest.mark.parametrize(
    ("times", "scale"),
    [
        ((10, 11, 8, 1), 1),
        ((5478, 5806, 3534, 200), 1 / 2),
        ((1.5, 2.25, 3, 0), 100 / 75),
        ((0.001, 0.002, 0.003, 0), 1000),
    ],
)
def test_times_become_whole_numbers_without_a_common_factor(times, scale):
    ticks, per_second = in_ticks(problem(2, 2, times))
    assert per_second == pytest.approx(scale)
    assert ticks.seconds[:3, 0, 0].tolist() == [round(time * scale) for time in times[:3]]


def test_times_of_many_digits_are_rounded_down():
    given = problem(2, 3, (np.pi, np.e, np.sqrt(2), 0.1))
    ticks, per_second = in_ticks(given)
    lost = given.seconds[:3] * per_second - ticks.seconds[:3]
    assert (lost >= 0).all()
    assert (lost < 1).all()
    assert ticks.seconds.max() >= 10**5
    answer = solve(given, unpack(given, pack(build("1f1b", 2, 3))), 0.0, seconds=60)
    assert answer.schedule is not None
    assert answer.bound <= value(given, answer.schedule) <= answer.bound * (1 + 1e-4)


def test_ctrl_c_is_pythons_again_after_the_solver():
    handler = signal.getsignal(signal.SIGINT)
    given = problem(2, 2, (1, 1, 1, 0))
    solve(given, unpack(given, pack(build("1f1b", 2, 2))), 0.0, seconds=60)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_input_gradient_may_add_to_memory():
    given = problem(2, 4, (2, 3, 1, 0), memory=(1, 1, -2), limit=3)
    answer = solve(given, unpack(given, pack(build("naive", 2, 4))), 0.0, seconds=60)
    assert answer.schedule is not None
    assert keeps_limit(given, answer.schedule)
    assert value(given, answer.schedule) == answer.bound
