from dataclasses import replace

import numpy as np
import pytest

from pipeswift.ir import (
    MAKES,
    NEEDS,
    Action,
    B,
    F,
    I,
    Op,
    Order,
    Overlap,
    Product,
    Schedule,
    W,
    loop,
    needs,
    parts,
    vee,
)
from pipeswift.schedules import gpipe, interleaved, one_f_one_b

PAIR = Overlap(F(0, 4), B(3, 1))


def test_actions_read_as_torch_writes_them():
    assert " ".join(map(str, (F(2, 5), I(2, 0), W(2, 0), B(1, 7)))) == "2F5 2I0 2W0 1B7"
    assert str(PAIR) == "(0F4;3B1)OVERLAP_F_B"


def test_whatever_is_needed_is_made():
    made = {product for products in MAKES for product in products}
    assert {product for wanted in NEEDS for product, _ in wanted} <= made
    assert MAKES[Op.B] == MAKES[Op.I] + MAKES[Op.W]
    assert NEEDS[Op.B] == NEEDS[Op.I]


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        (F(0, 1), ()),
        (F(1, 1), ((Product.OUTPUT, 0),)),
        (B(1, 1), ((Product.OUTPUT, 1), (Product.GRADIENT, 2))),
        (I(2, 1), ((Product.OUTPUT, 2),)),
        (W(1, 1), ((Product.GRADIENT, 1),)),
    ],
)
def test_needs_end_at_the_ends_of_the_pipeline(action, needed):
    assert needs(action, num_stages=3) == needed


def test_parts():
    assert parts(F(0, 1)) == (F(0, 1),)
    assert parts(PAIR) == (F(0, 4), B(3, 1))


ENTRIES = [F(0, 0), PAIR, W(0, 0), Overlap(F(0, 5), I(0, 2)), B(0, 3)]


def test_an_order_is_the_sequence_it_was_made_of():
    order = Order.of(ENTRIES)
    assert len(order) == 5
    assert list(order) == ENTRIES
    assert [order[i] for i in range(-5, 5)] == ENTRIES * 2
    assert order[1:4] == ENTRIES[1:4]
    assert order[::-2] == ENTRIES[::-2]
    assert len(list(order.actions())) == 7
    assert all(isinstance(action, Action) and isinstance(action.op, Op) for action in order.actions())
    with pytest.raises(IndexError):
        order[5]


def test_an_order_is_packed_and_fixed():
    order = Order.of(ENTRIES)
    assert order.rows.dtype == np.int32
    assert order.rows.shape == (7, 3)
    assert order.joined.tolist() == [1, 4]
    with pytest.raises(ValueError, match="read-only"):
        order.rows[0, 0] = 1


def test_orders_are_equal_when_they_say_the_same():
    assert Order.of(ENTRIES) == Order.of(iter(ENTRIES))
    assert hash(Order.of(ENTRIES)) == hash(Order.of(ENTRIES))
    assert Order.of([F(0, 4), B(3, 1)]) != Order.of([PAIR])
    assert Order.of([]) == Order(np.empty((0, 3)))


def test_an_order_prints_its_actions():
    assert repr(Order.of([F(0, 0), PAIR])) == "Order(0F0 (0F4;3B1)OVERLAP_F_B)"


def test_placements():
    assert [loop(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [vee(stage, 4) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_a_schedule_knows_its_size():
    schedule = interleaved(2, 4, 3)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, schedule.chunks) == (2, 6, 4, 3)
    assert schedule.num_actions == 2 * 6 * 4
    assert schedule.stages_on(1) == ((0, 1), (0, 3), (0, 5))
    assert schedule.rank_of(stage=3, microbatch=2) == 1
    assert not schedule.splits_backward


def test_routes_place_the_same_stage_twice():
    two_way = Schedule(orders=(Order.of([]),) * 2, routes=((0, 1), (1, 0)), route_of=(0, 1))
    assert two_way.chunks == 1
    assert two_way.stages_on(0) == ((0, 0), (1, 1))
    assert [two_way.rank_of(0, microbatch) for microbatch in (0, 1)] == [0, 1]


def test_the_fingerprint_is_of_what_is_done():
    schedule = one_f_one_b(2, 4)
    assert schedule.fingerprint == replace(schedule, name="mine", options={"chunks": 1}).fingerprint
    others = (one_f_one_b(2, 3), gpipe(2, 4), replace(schedule, flush=False), replace(schedule, routes=((1, 0),)))
    assert len({other.fingerprint for other in (schedule, *others)}) == 5
    assert one_f_one_b(2, 1).fingerprint == gpipe(2, 1).fingerprint
