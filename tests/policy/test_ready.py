"""Readiness: what makes an action one that may start, and when it stops being one."""

import pytest

from pipeswift.ir import Action, B, F, I, Order, Overlap, Product, Schedule, W
from pipeswift.policy import Ready, slots_of
from pipeswift.schedules import build
from pipeswift.schedules.forward_only import forward_only

OUTPUT, GRADIENT = Product.OUTPUT, Product.GRADIENT


def ready_of(p=2, m=3, rank=0, slots=3) -> Ready:
    schedule = build("1f1b", p, m)
    return Ready(schedule, rank, {(stage, 0): slots for stage in range(p)})


def run(ready: Ready, *actions: Action) -> None:
    for action in actions:
        assert action in ready
        ready.start(action)
        ready.finish(action)


def test_the_first_stage_may_start_at_once_and_the_others_wait_for_its_output():
    assert list(ready_of(rank=0)) == [F(0, 0)]
    last = ready_of(rank=1)
    assert list(last) == []
    last.arrive(OUTPUT, 0, 0)
    assert list(last) == [F(1, 0)]


def test_a_backward_waits_for_the_own_forward_and_the_next_stage_s_gradient():
    ready = ready_of(rank=0)
    ready.arrive(GRADIENT, 1, 0)
    assert B(0, 0) not in ready
    ready.start(F(0, 0))
    assert B(0, 0) not in ready
    ready.finish(F(0, 0))
    assert list(ready) == [F(0, 1), I(0, 0), B(0, 0)]


def test_the_last_stage_needs_no_gradient():
    ready = ready_of(rank=1)
    ready.arrive(OUTPUT, 0, 0)
    run(ready, F(1, 0), B(1, 0))


def test_a_split_backward_takes_w_after_i_and_never_twice():
    ready = ready_of(p=1, m=1)
    run(ready, F(0, 0), I(0, 0))
    assert list(ready) == [W(0, 0)]
    assert not ready.finished
    run(ready, W(0, 0))
    assert list(ready) == []
    assert ready.finished


def test_micro_batches_of_a_stage_go_in_order():
    ready = ready_of(rank=1)
    ready.arrive(OUTPUT, 0, 1)
    assert F(1, 1) not in ready
    with pytest.raises(ValueError, match="1F1 started out of order: micro-batch 0 was next"):
        ready.start(F(1, 1))


def test_a_forward_needs_a_free_slot_which_a_whole_backward_or_w_gives_back():
    ready = ready_of(p=1, m=3, slots=1)
    run(ready, F(0, 0))
    assert F(0, 1) not in ready
    assert ready.free_slots(0, 0) == 0
    run(ready, B(0, 0), F(0, 1), I(0, 1))
    assert F(0, 2) not in ready
    run(ready, W(0, 1))
    assert F(0, 2) in ready


def test_chunks_of_a_rank_hand_over_among_themselves():
    order = F(0, 0), F(1, 0), B(1, 0), B(0, 0)
    ready = Ready(Schedule((Order.of(order),), routes=((0, 0),), route_of=(0,)), 0, {(0, 0): 1, (1, 0): 1})
    run(ready, *order)
    assert ready.finished


def test_each_route_has_its_own_order_and_slots():
    orders = [Order.of([F(rank, 0), F(1 - rank, 1), B(1 - rank, 1), B(rank, 0)]) for rank in range(2)]
    schedule = Schedule(tuple(orders), routes=((0, 1), (1, 0)), route_of=(0, 1, 0, 1))
    ready = Ready(schedule, 0, slots={(0, 0): 1, (1, 0): 1, (0, 1): 1, (1, 1): 1})
    ready.arrive(OUTPUT, 0, 1)
    assert list(ready) == [F(0, 0), F(1, 1)]
    run(ready, F(0, 0))
    assert list(ready) == [F(1, 1)]  # 0F2 is next on its route, without a slot


def test_what_is_next_and_what_is_here_can_be_asked():
    ready = ready_of(rank=1)
    assert list(ready.next_in_line()) == [F(1, 0), I(1, 0), B(1, 0)]
    assert not ready.has(OUTPUT, 0, 0)
    ready.arrive(OUTPUT, 0, 0)
    assert ready.has(OUTPUT, 0, 0)


def test_a_forward_only_schedule_is_finished_by_its_forwards():
    schedule = Schedule((Order.of([F(0, 0), F(0, 1)]),), routes=((0,),), route_of=(0, 0))
    ready = Ready(schedule, 0, {(0, 0): 1})
    run(ready, F(0, 0), F(0, 1))
    assert ready.finished


class TestSlots:
    def test_of_published_schedules_are_their_peaks(self):
        assert [slots_of(build("1f1b", 4, 8))[stage, 0] for stage in range(4)] == [4, 3, 2, 1]
        assert [slots_of(build("gpipe", 4, 8))[stage, 0] for stage in range(4)] == [8, 8, 8, 8]

    @pytest.mark.parametrize("woven", [Overlap(F(0, 1), B(0, 0)), Overlap(B(0, 0), F(0, 1))])
    def test_an_overlap_holds_both_of_its_micro_batches(self, woven):
        schedule = Schedule((Order.of([F(0, 0), woven, B(0, 1)]),), routes=((0,),), route_of=(0, 0))
        assert slots_of(schedule) == {(0, 0): 2}

    def test_a_split_backward_keeps_its_slot_until_w(self):
        order = Order.of([F(0, 0), I(0, 0), F(0, 1), W(0, 0), I(0, 1), W(0, 1)])
        assert slots_of(Schedule((order,), routes=((0,),), route_of=(0, 0))) == {(0, 0): 2}


def test_a_forward_leaves_its_output_to_the_next_stage_on_the_rank():
    # In a forward-only schedule it took the output away, and evaluation over a V placement waited for good.
    schedule = forward_only(build("zb-v", 2, 2), 1)
    ready = Ready(schedule, 1, slots_of(schedule))
    ready.arrive(Product.OUTPUT, 0, 0)
    for action in (F(1, 0), F(2, 0)):
        assert action in ready
        ready.start(action)
        ready.finish(action)
    assert ready.finished
