import pytest

from pipeswift.ir import Op
from pipeswift.schedules import Times, zb_h1
from pipeswift.verify import peak_activations
from tests.schedules.figure import draw, figure_of, idle


def test_zb_h1_is_the_figure():
    assert draw(zb_h1(3, 4)) == figure_of(zb_h1.__doc__)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 20), (4, 3), (8, 1), (1, 5)])
def test_no_rank_holds_more_than_the_first_rank_of_1f1b(p, m):
    assert peak_activations(zb_h1(p, m)).tolist() == [min(m, p)] * p


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 20)])
def test_rank_r_holds_each_weight_gradient_back_by_r_micro_batches(p, m):
    for rank, order in enumerate(zb_h1(p, m).orders):
        ops = [action.op for action in order.actions()]
        assert ops.index(Op.I) == p - rank
        assert ops[: ops.index(Op.W)].count(Op.I) == rank + 1


def test_a_third_of_1f1bs_idle_time_with_equal_passes():
    """The I-only formula: 7 = (p-1)(F+I-W), the same as (p-1)(F+B-2W) with B = I + W; 1F1B idles (p-1)(F+B) = 21."""
    assert max(idle(zb_h1(8, 20), Times(1, 1, 1))) == 7
