import numpy as np

from pipeswift.ir import vee
from pipeswift.schedules import build
from pipeswift.search.pattern import in_rounds, pattern_of, running_ahead
from tests.search.problems import problem


def words(codes: np.ndarray, microbatches: int) -> str:
    return " ".join(f"{stage}:{i}" for stage, i in zip(*divmod(codes, microbatches), strict=True))


def test_rounds_go_up_through_a_ranks_stages_and_down_again():
    given = problem(2, 3, (1, 1, 1, 0), memory=None, chunks=2, placement=vee)
    forwards, backwards = in_rounds(given, 2)
    assert words(forwards[0], 3) == "0:0 0:1 3:0 3:1 0:2 3:2"
    assert words(backwards[0], 3) == "3:0 3:1 0:0 0:1 3:2 0:2"


def test_a_warm_up_and_then_one_of_each():
    given = problem(3, 5, (1, 1, 1, 0))
    pattern = running_ahead(*in_rounds(given, 1), np.array([3, 2, 1]))
    assert pattern.ahead.tolist() == [[3, 4, 5, 5, 5], [2, 3, 4, 5, 5], [1, 2, 3, 4, 5]]


def test_an_input_gradient_comes_after_its_own_forward():
    given = problem(2, 3, (1, 1, 1, 0), memory=None, chunks=2, placement=vee)
    pattern = running_ahead(*in_rounds(given, 3), np.array([1, 1]))
    assert pattern.least[0].tolist() == [4, 5, 6, 6, 6, 6]
    assert (pattern.ahead == pattern.least).all()


def test_the_pattern_of_a_schedule_counts_a_whole_backward_as_its_input_gradient():
    whole, split = pattern_of(build("1f1b", 3, 4)), pattern_of(build("zb-h1", 3, 4))
    assert whole.ahead[0].tolist() == [3, 4, 4, 4]
    assert all((one == other).all() for one, other in zip(whole, split, strict=True))
