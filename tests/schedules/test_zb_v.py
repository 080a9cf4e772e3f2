import pytest

from pipeswift.schedules import Times, zb_v
from pipeswift.verify import peak_activations
from tests.schedules.figure import draw, figure_of, idle


def test_zb_v_is_the_figure():
    assert draw(zb_v(2, 4)) == figure_of(zb_v.__doc__)


def test_stages_go_there_and_back():
    """Rank r holds stages r and 7-r, not r and r+4: the schedule owns the placement."""
    assert zb_v(4, 8).routes == ((0, 1, 2, 3, 3, 2, 1, 0),)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 8), (5, 9), (8, 24), (16, 64)])
def test_no_rank_idles_between_its_first_and_its_last_pass(p, m):
    assert idle(zb_v(p, m), Times(1, 1, 1), by="span") == [0] * p


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24), (16, 64), (1, 4)])
def test_every_rank_holds_what_the_first_rank_of_1f1b_does(p, m):
    assert peak_activations(zb_v(p, m)).tolist() == [p] * p
