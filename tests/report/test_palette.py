import pytest

from pipeswift.report.palette import HUES, chunk_of, ink, shade
from tests.report.timelines import timeline


def test_chunks_count_from_a_ranks_lowest_stage():
    vee = timeline((0, "0F0", 0, 1), (1, "1F0", 1, 2), (1, "2F0", 2, 3), (0, "3F0", 3, 4), (0, "0B0", 4, 5))
    assert chunk_of(vee).tolist() == [0, 0, 1, 1, 0]


def test_chunks_of_stages_that_two_ranks_hold():
    both_ways = timeline((0, "0F0", 0, 1), (0, "1F1", 1, 2), (1, "0F1", 0, 1), (1, "1F0", 1, 2))
    assert chunk_of(both_ways).tolist() == [0, 1, 0, 1]


def test_the_first_chunk_is_pure_and_later_ones_are_paler():
    pure, paler, palest = (int(shade("#102030", chunk, 3)[1:3], 16) for chunk in range(3))
    assert pure == 0x10
    assert pure < paler < palest < 0xFF


@pytest.mark.parametrize("hue", HUES)
def test_text_can_be_read_on_every_shade(hue):
    assert ink(shade(hue, 1, 2)) == "#1f2328"
    assert ink("#000000") == "#ffffff"
