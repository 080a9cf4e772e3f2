from pipeswift.schedules import gpipe
from pipeswift.verify import peak_activations
from tests.schedules.figure import draw, figure_of, timeline


def test_gpipe_is_the_figure():
    assert draw(gpipe(3, 4)) == figure_of(gpipe.__doc__)


def test_all_micro_batches_are_alive_at_once():
    assert peak_activations(gpipe(4, 8)).tolist() == [8, 8, 8, 8]


def test_fewer_micro_batches_than_ranks():
    for m, makespan in ((1, 12), (2, 15)):
        assert max(end for _, end in timeline(gpipe(4, m), F=1, B=2).values()) == makespan
