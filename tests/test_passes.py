from dataclasses import replace

import pytest

from pipeswift.codec import from_csv
from pipeswift.ir import B, F, Op, Order, Product, Schedule
from pipeswift.passes import Transfer, fuse_backward, overlap, split_backward, transfers, weight_runs
from pipeswift.schedules import build, entries, gpipe, interleaved, one_f_one_b
from pipeswift.verify import verify


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_split_backward_puts_w_behind_i():
    assert rows(split_backward(build("1f1b", 2, 2))) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]


def test_split_backward_lets_w_out_of_an_overlap():
    schedule = from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0B1;0F3)OVERLAP_F_B,0B2,0B3")
    assert rows(split_backward(schedule)) == [
        "0F0 0F1 (0F2;0I0)OVERLAP_F_B 0W0 (0I1;0F3)OVERLAP_F_B 0W1 0I2 0W2 0I3 0W3"
    ]


def test_fuse_backward_joins_neighbours_only():
    schedule = from_csv("0F0,0F1,0F2,0I0,0I1,0W0,0W1,0I2,0W2")
    assert rows(fuse_backward(schedule)) == ["0F0 0F1 0F2 0I0 0I1 0W0 0W1 0B2"]


def test_weight_runs_are_w_of_one_stage_next_to_each_other():
    order = build("zb-h1", 3, 4).orders[2]
    assert " ".join(map(str, order)) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"
    assert weight_runs(order) == [(2, (0,)), (2, (1, 2, 3))]
    (order,) = from_csv("0F0,1F0,0F1,1F1,1I0,1I1,0I0,0I1,1W0,1W1,0W0,(1F2;0W1)OVERLAP_F_B,1I2,0F2,0I2,1W2,0W2").orders
    assert weight_runs(order) == [(1, (0, 1)), (0, (0,)), (1, (2,)), (0, (2,))]


def test_fuse_backward_leaves_overlaps_alone():
    schedule = from_csv("0F0,0I0,0W0,(0F1;0I1)OVERLAP_F_B,0W1,(0I2;0W2)OVERLAP_F_B,0I3,(0W3;0F4)OVERLAP_F_B")
    assert rows(fuse_backward(schedule)) == [
        "0F0 0B0 (0F1;0I1)OVERLAP_F_B 0W1 (0I2;0W2)OVERLAP_F_B 0I3 (0W3;0F4)OVERLAP_F_B"
    ]


WHOLE = [found.name for found in entries() if not build(found.name, 4, 8).splits_backward]


@pytest.mark.parametrize("name", [name for name in WHOLE if not build(name, 4, 8).overlaps])
def test_fusing_undoes_splitting(name):
    schedule = build(name, 4, 8)
    assert split_backward(schedule).splits_backward
    assert fuse_backward(split_backward(schedule)) == schedule


def test_overlap_weaves_the_next_forward_into_the_next_backward():
    assert rows(overlap(one_f_one_b(2, 3))) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1B2",
    ]


@pytest.mark.parametrize("name", WHOLE)
def test_overlap_keeps_what_runs_and_its_order(name):
    schedule = build(name, 4, 8)
    woven = overlap(schedule)
    assert verify(woven) == []
    assert overlap(woven) == woven
    for before, after in zip(schedule.orders, woven.orders, strict=True):
        for op in (Op.F, Op.B):
            assert [a for a in after.actions() if a.op is op] == [a for a in before.actions() if a.op is op]


def test_overlap_refuses_what_it_cannot_weave():
    with pytest.raises(ValueError, match="zb-h1 splits its backwards"):
        overlap(build("zb-h1", 2, 4))
    with pytest.raises(ValueError, match="cannot finish"):
        overlap(from_csv("0F0\n1B0\n"))


def test_transfers_are_what_crosses_ranks():
    assert list(transfers(gpipe(2, 2))) == [
        Transfer(Product.OUTPUT, stage=0, microbatch=0, source=0, destination=1, boundary=0),
        Transfer(Product.OUTPUT, stage=0, microbatch=1, source=0, destination=1, boundary=0),
        Transfer(Product.GRADIENT, stage=1, microbatch=0, source=1, destination=0, boundary=0),
        Transfer(Product.GRADIENT, stage=1, microbatch=1, source=1, destination=0, boundary=0),
    ]


def test_the_gradient_travels_after_i():
    schedule = gpipe(3, 2)
    assert list(transfers(split_backward(schedule))) == list(transfers(schedule))


def test_loop_placement_wraps_around():
    ends = {(t.source, t.destination, t.boundary) for t in transfers(interleaved(2, 2, 2)) if t.product == 0}
    assert ends == {(0, 1, 0), (1, 0, 1), (0, 1, 2)}


def test_what_stays_on_a_rank_is_no_message():
    assert len(transfers(gpipe(1, 3))) == 0
    turn = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert {t.boundary for t in transfers(turn)} == {0, 2}


def test_routes_decide_who_sends():
    two_way = replace(
        gpipe(2, 2),
        orders=(Order.of([F(0, 0), F(1, 1), B(1, 1), B(0, 0)]), Order.of([F(0, 1), F(1, 0), B(1, 0), B(0, 1)])),
        routes=((0, 1), (1, 0)),
        route_of=(0, 1),
    )
    assert [(t.microbatch, t.source, t.destination) for t in transfers(two_way)] == [
        (0, 0, 1),
        (1, 0, 1),
        (1, 1, 0),
        (0, 1, 0),
    ]
