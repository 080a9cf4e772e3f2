from dataclasses import replace

import pytest

from pipeswift.cost import Costs
from pipeswift.ir import Overlap
from pipeswift.schedules import build, interleaved_overlap, one_f_one_b_overlap
from pipeswift.simulate import replay
from pipeswift.trace import makespan
from tests.schedules.figure import draw, figure_of


def test_the_figures():
    assert draw(one_f_one_b_overlap(3, 6)) == figure_of(one_f_one_b_overlap.__doc__)
    assert draw(interleaved_overlap(2, 4, 2)) == figure_of(interleaved_overlap.__doc__)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4)])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 8), (4, 16), (8, 32)])
def test_what_weaving_gains_is_what_pairs_gain(name, v, p, m):
    """Against the schedule without pairs: nothing lost where a pair takes F + B, else what it saves each time."""
    plain = makespan(replay(build(name, p, m, v), Costs.uniform(p * v, chunks=v)))
    woven = build(f"{name}-overlap", p, m, v)
    pairs = {sum(isinstance(entry, Overlap) for entry in order) for order in woven.orders}
    for pair in (3, 2.5, 2):
        trace = replay(woven, replace(Costs.uniform(p * v, chunks=v), overlap=pair / v))
        gained = (3 - pair) / v * max(pairs)
        assert makespan(trace) == pytest.approx(plain - gained)
    assert max(pairs) == m * v - (v - 1) * p - 1


def test_interleaving_warms_up_with_one_forward_more():
    plain, woven = build("interleaved-1f1b", 4, 8, 2), build("interleaved-1f1b-overlap", 4, 8, 2)
    for before, after in zip(plain.orders, woven.orders, strict=True):
        first_backward = [action.op for action in before.actions()].index(3)
        first_pair = [isinstance(entry, Overlap) for entry in after].index(True)
        assert first_pair == first_backward
