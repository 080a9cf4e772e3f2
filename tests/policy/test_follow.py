"""Following: the next entry of the order, or nothing."""

from pipeswift.ir import B, F, Order, Overlap, Product, Schedule
from pipeswift.policy import Decision, Follow, Ready, View, slots_of
from pipeswift.schedules import build


def test_starts_the_next_entry_once_it_is_ready():
    schedule = build("1f1b", 2, 2)
    policy, ready = Follow(schedule), Ready(schedule, 1, slots_of(schedule))
    assert policy.next(ready, View(rank=1, now=0.0, started=0)).entry is None
    ready.arrive(Product.OUTPUT, 0, 0)
    assert policy.next(ready, View(rank=1, now=1.0, started=0)).entry == F(1, 0)


def test_waits_for_its_entry_whatever_else_is_ready():
    schedule = build("1f1b", 2, 4)
    policy, ready = Follow(schedule), Ready(schedule, 0, {(0, 0): 4, (1, 0): 4})
    for action in (F(0, 0), F(0, 1)):
        ready.start(action)
        ready.finish(action)
    assert F(0, 2) in ready
    assert policy.next(ready, View(rank=0, now=2.0, started=2)).entry is None  # 0B0 is next


def test_same_facts_same_answer():
    schedule = build("gpipe", 1, 2)
    policy, ready = Follow(schedule), Ready(schedule, 0, slots_of(schedule))
    view = View(rank=0, now=0.0, started=0)
    assert policy.next(ready, view) == policy.next(ready, view) == Decision(F(0, 0))


def test_an_overlap_starts_when_both_parts_are_ready():
    woven = Overlap(F(0, 1), B(0, 0))
    schedule = Schedule(
        orders=(Order.of([F(0, 0), woven, B(0, 1)]), Order.of([F(1, 0), B(1, 0), F(1, 1), B(1, 1)])),
        routes=((0, 1),),
        route_of=(0, 0),
    )
    policy, ready = Follow(schedule), Ready(schedule, 0, slots_of(schedule))
    ready.start(F(0, 0))
    ready.finish(F(0, 0))
    assert policy.next(ready, View(rank=0, now=1.0, started=1)).entry is None
    ready.arrive(Product.GRADIENT, 1, 0)
    assert policy.next(ready, View(rank=0, now=3.0, started=1)).entry == woven


def test_nothing_after_the_last_entry():
    schedule = build("1f1b", 1, 1)
    policy, ready = Follow(schedule), Ready(schedule, 0, slots_of(schedule))
    assert policy.next(ready, View(rank=0, now=3.0, started=2)).entry is None
