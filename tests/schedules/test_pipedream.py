from math import ceil

import pytest

from pipeswift.ir import Op
from pipeswift.schedules import ScheduleError, build, one_f_one_b, pipedream
from pipeswift.verify import peak_activations, verify
from tests.schedules.figure import draw, figure_of

REPLICAS = [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2), (3, 1, 1), (1, 1, 3), (2, 2, 1), (4, 1, 2), (2, 1, 2, 1)]


def test_pipedream_is_the_figure():
    assert draw(pipedream(3, 5)) == figure_of(pipedream.__doc__)


def test_its_order_is_that_of_1f1b_and_it_does_not_flush():
    assert pipedream(4, 9).orders == one_f_one_b(4, 9).orders
    assert not build("pipedream", 4, 9).flush


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("m", [1, 2, 5, 12, 24])
def test_replicated_stages_take_micro_batches_in_turn(replicas, m):
    made = pipedream(sum(replicas), m, replicas)
    assert verify(made) == []
    first = 0
    for stage, count in enumerate(replicas):
        assert [made.rank_of(stage, i) for i in range(m)] == [first + i % count for i in range(m)]
        first += count


@pytest.mark.parametrize("replicas", REPLICAS)
def test_noam_is_the_ranks_over_those_of_the_input_stage(replicas):
    made = pipedream(sum(replicas), 24, replicas)
    noam = ceil(sum(replicas) / replicas[0])
    assert peak_activations(made)[: replicas[0]].tolist() == [noam] * replicas[0]
    assert [action.op for action in made.orders[0].actions()].index(Op.B) == noam


def test_the_vgg_of_the_paper():
    # Narayanan et al. 2019: 9-5-1-1 keeps two micro-batches in flight at each of the nine ranks of the input stage.
    made = pipedream(16, 90, (9, 5, 1, 1))
    assert verify(made) == []
    assert peak_activations(made)[0] == 2


def test_replicas_that_do_not_add_up():
    with pytest.raises(ScheduleError, match=r"replicas = \[2, 1\] do not add up to 4 ranks"):
        pipedream(4, 8, (2, 1))
