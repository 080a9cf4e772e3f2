import pytest

from pipeswift.schedules import Times, v_min
from pipeswift.verify import peak_activations
from tests.schedules.figure import draw, figure_of, idle


def test_v_min_is_the_figure():
    assert draw(v_min(2, 3)) == figure_of(v_min.__doc__)


@pytest.mark.parametrize("p", [2, 3, 4, 8, 9, 16])
@pytest.mark.parametrize("m", [1, 5, 40])
def test_idle_time_does_not_depend_on_micro_batches(p, m):
    passes = max(idle(v_min(p, m), Times(1, 1, 1), by="span"))
    assert passes == 4 * p - (5 if p % 3 else 4)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24), (16, 64), (3, 9), (1, 3)])
def test_a_third_of_the_memory_of_1f1b(p, m):
    assert peak_activations(v_min(p, m)).max() == (p + 4) // 3
