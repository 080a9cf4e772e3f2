import pytest

from pipeswift.ir import Op
from pipeswift.schedules import Times, zb_h2
from pipeswift.verify import peak_activations
from tests.schedules.figure import draw, figure_of, idle


def test_zb_h2_is_the_figure():
    assert draw(zb_h2(3, 6)) == figure_of(zb_h2.__doc__)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 20), (4, 3), (8, 1), (1, 5)])
def test_every_rank_holds_2p_minus_1(p, m):
    assert peak_activations(zb_h2(p, m)).tolist() == [min(m, 2 * p - 1)] * p


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 20)])
def test_rank_r_holds_each_weight_gradient_back_by_2r_micro_batches(p, m):
    for rank, order in enumerate(zb_h2(p, m).orders):
        ops = [action.op for action in order.actions()]
        assert ops.index(Op.I) == 2 * (p - rank) - 1
        assert ops[: ops.index(Op.W)].count(Op.I) == 2 * rank + 1


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_no_rank_idles_between_its_first_and_its_last_pass(p):
    assert idle(zb_h2(p, 2 * p - 1), Times(1, 1, 1), by="span") == [0] * p


def test_a_barrier_at_the_end_of_the_step_brings_the_stagger_back():
    """The span of a rank is what counts only when the optimizer step needs no barrier."""
    assert max(idle(zb_h2(4, 8), Times(1, 1, 1), by="makespan")) == 3
