import pytest

from pipeswift.schedules import Times, v_half
from pipeswift.verify import peak_activations, verify
from tests.schedules.figure import draw, figure_of, idle

EQUAL = Times(1, 1, 1)


def test_v_half_is_the_figure():
    assert draw(v_half(3, 4)) == figure_of(v_half.__doc__)


@pytest.mark.parametrize("p", [3, 4, 5, 8, 11, 16])
@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_idle_time_does_not_grow_with_micro_batches(p, rounds):
    passes = max(idle(v_half(p, rounds * p + 1), EQUAL, by="span"))
    assert passes == 3 * p - (4 if p % 2 else 7)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24), (16, 64), (5, 20), (1, 3)])
def test_every_rank_holds_half_of_what_1f1b_does(p, m):
    assert peak_activations(v_half(p, m)).tolist() == [(p + 2) // 2] * p


@pytest.mark.parametrize("times", [Times(1, 2, 1), Times(18.5, 18.1, 9.3), Times(1, 0.8, 1.2), Times(3, 1, 0.5)])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (3, 7), (4, 2), (8, 24)])
def test_orders_for_other_costs_are_valid_and_keep_the_memory(times, p, m):
    assert verify(v_half(p, m, times), receive_pool=1, memory_limit=(p + 2) // 2) == []


def test_an_order_for_the_costs_at_hand_idles_less():
    times = Times(1, 2, 1)
    of_equal, of_these = (max(idle(order, times, by="span")) for order in (v_half(8, 24), v_half(8, 24, times)))
    assert of_these < 0.6 * of_equal


def test_only_the_ratios_of_the_costs_matter():
    assert v_half(4, 8, Times(2, 2, 2)) == v_half(4, 8)
