from pipeswift.schedules import naive
from pipeswift.verify import peak_activations
from tests.schedules.figure import draw, figure_of


def test_naive_is_the_figure():
    assert draw(naive(3, 2)) == figure_of(naive.__doc__)


def test_one_micro_batch_is_alive_at_a_time():
    assert peak_activations(naive(4, 8)).tolist() == [1, 1, 1, 1]
