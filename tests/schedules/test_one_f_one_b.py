import pytest

from pipeswift.ir import Op
from pipeswift.schedules import one_f_one_b
from pipeswift.verify import peak_activations
from tests.schedules.figure import draw, figure_of, timeline


def test_one_f_one_b_is_the_figure():
    assert draw(one_f_one_b(3, 4)) == figure_of(one_f_one_b.__doc__)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 20])
def test_no_rank_holds_more_than_its_distance_to_the_end(p, m):
    assert peak_activations(one_f_one_b(p, m)).tolist() == [min(m, p - r) for r in range(p)]


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 2), (1, 3), (8, 1)])
def test_warm_up_counts(p, m):
    first_backward = [[a.op for a in order.actions()].index(Op.B) for order in one_f_one_b(p, m).orders]
    assert first_backward == [min(m, p - r) for r in range(p)]


def test_fewer_micro_batches_than_ranks():
    for m, makespan in ((1, 12), (2, 15)):
        assert max(end for _, end in timeline(one_f_one_b(4, m), F=1, B=2).values()) == makespan
