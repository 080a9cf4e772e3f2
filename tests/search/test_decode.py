import numpy as np
import pytest

from pipeswift.ir import Op
from pipeswift.report.terminal import draw
from pipeswift.schedules import build
from pipeswift.search.compiled import Compiled, Point
from pipeswift.search.packed import keeps_limit, pack, unpack, value
from pipeswift.search.pattern import Pattern, in_rounds, pattern_of, running_ahead
from pipeswift.simulate import replay
from pipeswift.verify import verify
from tests.search.problems import problem

NEVER = np.inf


def decode(given, pattern: Pattern, fit: float = 1.0, budget: float = NEVER):
    p = given.ranks
    point = Point(pattern, np.zeros(p, dtype=np.int64), np.full(p, fit), np.full(p, budget))
    seconds, orders = Compiled(given).decode(point)
    return seconds, unpack(given, orders)


def warm(given, *forwards: int) -> Pattern:
    return running_ahead(*in_rounds(given, 1), np.array(forwards))


def picture(given, *arguments, **settings) -> str:
    _, schedule = decode(given, *arguments, **settings)
    return draw(replay(schedule, given.costs))


def test_weight_gradients_go_into_gaps_that_hold_them():
    given = problem(3, 3, (1, 1, 1, 0))
    assert picture(given, warm(given, 3, 2, 1)) == "\n".join(
        [
            "F0 F1 F2 .. .. I0 W0 I1 W1 I2 W2",
            ".. F0 F1 .. I0 F2 I1 W0 I2 W1 W2",
            ".. .. F0 I0 F1 I1 F2 I2 W0 W1 W2",
        ]
    )


def test_a_gap_that_is_a_little_short_is_filled_where_half_a_fit_will_do():
    given = problem(2, 2, (2, 3, 2, 0))
    whole, half = (picture(given, warm(given, 2, 1), fit=fit).splitlines()[0].split() for fit in (1.0, 0.5))
    assert [cell[:2] for cell in whole if cell[0] in "FIW"] == ["F0", "F1", "I0", "W0", "I1", "W1"]
    assert whole == half  # this gap holds a W whole

    slow = problem(2, 2, (2, 3, 3, 0))
    whole, half = (picture(slow, warm(slow, 2, 1), fit=fit).splitlines()[0].split() for fit in (1.0, 0.5))
    assert [cell[:2] for cell in whole if cell[0] in "FIW"] == ["F0", "F1", "I0", "I1", "W0", "W1"]
    assert [cell[:2] for cell in half if cell[0] in "FIW"] == ["F0", "F1", "I0", "W0", "I1", "W1"]


def test_a_rank_that_has_idled_enough_fills_every_gap():
    given = problem(2, 2, (2, 3, 3, 0))
    assert picture(given, warm(given, 2, 1), budget=0.0) == picture(given, warm(given, 2, 1), fit=0.5)


def test_full_memory_makes_room_by_weight_gradients_and_then_by_input_gradients():
    given = problem(2, 4, (1, 1, 1, 0), limit=2)
    seconds, schedule = decode(given, warm(given, 4, 4))
    assert keeps_limit(given, schedule)
    assert verify(schedule) == []
    assert seconds == value(given, schedule)
    assert [str(action) for action in schedule.orders[0]][:5] == ["0F0", "0F1", "0I0", "0W0", "0F2"]


def test_a_rank_that_waits_for_a_forward_that_cannot_come_goes_back_first():
    """Rank 0 has memory for two, rank 1 would like to begin with three."""
    given = problem(2, 4, (1, 1, 1, 0), limit=2)
    _, schedule = decode(given, warm(given, 2, 3))
    assert [str(action) for action in schedule.orders[1]][:3] == ["1F0", "1F1", "1I0"]


def test_room_is_kept_for_what_an_input_gradient_adds():
    given = problem(2, 4, (1, 1, 1, 0), memory=(1, 1, -2), limit=3)
    seconds, schedule = decode(given, warm(given, 4, 3))
    assert np.isfinite(seconds)
    assert keeps_limit(given, schedule)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-1f1b"])
def test_published_patterns_decode_to_something_that_runs(name):
    published = build(name, 4, 8)
    place = [published.routes[0].index(rank) for rank in range(4)]
    assert place == [0, 1, 2, 3]
    from pipeswift.ir import loop, vee

    placement = vee if published.routes[0][-1] == 0 else loop
    given = problem(4, 8, (3, 3, 2, 0.5), memory=None, chunks=published.chunks, placement=placement)
    seconds, schedule = decode(given, pattern_of(unpack(given, pack(published))))
    assert verify(schedule) == []
    assert seconds == pytest.approx(value(given, schedule))
    assert all((np.bincount(order.rows[:, 1]) == [8 * published.chunks] * 3).all() for order in schedule.orders)
    assert Op.B not in {op for order in schedule.orders for op in order.rows[:, 1].tolist()}
