import numpy as np
import pytest

from pipeswift.ir import Op
from pipeswift.schedules import build
from pipeswift.search.anneal import _move
from pipeswift.search.compiled import Compiled
from pipeswift.search.packed import keeps_limit, pack, unpack, value
from pipeswift.verify import verify
from tests.search.problems import problem


def moved(text: str, source: int, target: int) -> str:
    rows = np.array([(0, Op[word[0]], int(word[1])) for word in text.split()], dtype=np.uint32)
    _move(rows, source, target)
    return " ".join(f"{Op(op).name}{microbatch}" for _, op, microbatch in rows.tolist())


def test_a_pass_that_meets_others_of_its_kind_swaps_micro_batches_with_them():
    assert moved("F0 I0 W0 F1 I1 W1", 2, 4) == "F0 I0 F1 I1 W0 W1"
    assert moved("F0 I0 W0 F1 I1 W1", 5, 1) == "F0 W0 I0 W1 F1 I1"
    assert moved("F0 F1 F2 I0 I1 I2", 0, 3) == "F0 F1 I0 F2 I1 I2"


@pytest.mark.parametrize("way", [(0, 5), (5, 0), (1, 3), (4, 2)])
def test_a_move_back_undoes_a_move(way):
    text = "F0 I0 W0 F1 I1 W1"
    assert moved(moved(text, *way), *reversed(way)) == text


def test_the_value_is_that_of_the_replay():
    given = problem(3, 5, (5, 6, 4, 0.5), limit=4)
    schedule = build("zb-h1", 3, 5)
    assert Compiled(given).value(pack(schedule)) == value(given, schedule)


@pytest.mark.parametrize("variability", [0.0, 0.3])
def test_annealing_never_makes_it_worse_and_keeps_every_rule(variability):
    given = problem(3, 7, (5, 6, 4, 0.5), limit=4, variability=variability)
    start = build("zb-h1", 3, 7)
    orders = pack(start)
    found = Compiled(given).anneal(orders, reach=8, heat=0.5, seed=1, tries=3000)
    schedule = unpack(given, orders)
    assert found == pytest.approx(value(given, schedule))
    assert found < value(given, start)
    assert keeps_limit(given, schedule)
    assert verify(schedule) == []
