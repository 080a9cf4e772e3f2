import pytest

from pipeswift.ir import Op
from pipeswift.schedules import interleaved
from pipeswift.verify import peak_activations
from tests.schedules.figure import draw, figure_of


def test_interleaved_is_the_figure():
    assert draw(interleaved(2, 4, 2)) == figure_of(interleaved.__doc__)


def test_stages_go_round():
    assert interleaved(4, 8, 2).routes == ((0, 1, 2, 3, 0, 1, 2, 3),)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (4, 8, 3), (2, 6, 4), (1, 5, 2), (3, 9, 1)])
def test_warm_up_counts(p, m, v):
    first_backward = [[a.op for a in order.actions()].index(Op.B) for order in interleaved(p, m, v).orders]
    # The first backward follows the first forward after the warm-up, unless there is none left.
    assert first_backward == [min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]


def test_as_many_micro_batches_as_ranks_warm_up_with_all_forwards():
    for order in interleaved(4, 4, 2).orders:
        assert [a.op for a in order.actions()] == [Op.F] * 8 + [Op.B] * 8


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_the_first_rank_holds_pv_plus_p_minus_1_chunks(p, v):
    assert peak_activations(interleaved(p, 4 * p, v))[0] * v == p * v + p - 1
