"""Placements are permutations that give every rank as many experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift.moe import Placement, PlacementError, contiguous, shuffled


def test_contiguous_is_the_picture():
    placement = contiguous(experts=6, ranks=3)
    assert [list(placement.held_by(rank)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [placement.rank_of(expert) for expert in range(6)] == [0, 0, 1, 1, 2, 2]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 100))
def test_every_expert_has_one_home(ranks, per_rank, seed):
    placement = shuffled(ranks * per_rank, ranks, seed)
    assert placement == shuffled(ranks * per_rank, ranks, seed)
    homes = [expert for rank in range(ranks) for expert in placement.held_by(rank)]
    assert sorted(homes) == list(range(ranks * per_rank))
    for rank in range(ranks):
        assert {placement.rank_of(expert) for expert in placement.held_by(rank)} == {rank}
    assert all(placement.order[slot] == expert for expert, slot in enumerate(placement.slot_of))


def test_what_does_not_divide_is_refused():
    with pytest.raises(PlacementError, match=r"6 experts do not spread evenly over ep = 4 ranks.*1, 2, 3, 6"):
        contiguous(experts=6, ranks=4)
    with pytest.raises(PlacementError, match="once: got"):
        Placement((0, 0), ranks=1)
