"""What a rank's time goes into, read off small timelines."""

import numpy as np
import pytest

from pipeswift.report.usage import activity, usage
from pipeswift.trace import ALL_TO_ALL, EmptyTrace
from tests.report.timelines import LANES, SHORT, WOVEN, timeline


def units(trace, whole):
    return [[round(whole * share, 9) for share in row] for row in usage(trace)]


def test_all_to_alls_are_hidden_beside_passes_and_exposed_without():
    # busy, exposed, reducing, idle, hidden
    assert units(LANES, 11) == [[6, 1, 1, 3, 2], [6, 0, 0, 5, 0]]


def test_without_other_lanes_a_rank_is_busy_or_idle():
    assert units(SHORT, 3) == [[1.5, 0, 0, 1.5, 0], [1.5, 0, 0, 1.5, 0]]


def test_woven_passes_count_once():
    assert units(WOVEN, 3) == [[3, 0, 0, 0, 0]] * 2


def test_a_reduction_beside_an_all_to_all_does_not_count_twice():
    sent = timeline((0, "0F0", 0, 4), (0, "0W1", 2, 8), lane=ALL_TO_ALL)
    assert units(sent, 8) == [[0, 4, 4, 0, 0]]


def test_the_first_four_shares_are_the_whole():
    assert all(sum(row[:4]) == pytest.approx(1) for row in usage(LANES))


def test_what_a_rank_is_at_between_two_moments():
    found = activity(LANES.by_rank()[0])
    assert found.moments.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert np.flatnonzero(found.compute).tolist() == [0, 1, 3, 5, 6, 7]
    assert np.flatnonzero(found.exchange).tolist() == [1, 2, 6]
    assert np.flatnonzero(found.reduction).tolist() == [8]


def test_an_empty_trace_has_no_usage():
    with pytest.raises(EmptyTrace):
        usage(SHORT.only(SHORT.rank > 9))
