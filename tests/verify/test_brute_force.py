"""The verifier and a brute-force executor agree on which schedules may run."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift.ir import Action, Op, Order, Overlap, Schedule, needs, vee
from pipeswift.passes import split_backward
from pipeswift.schedules import build
from pipeswift.verify import verify
from tests.verify.brute_force import accepts

SHAPES = [
    *(("naive", 2, 2), ("naive", 3, 2), ("gpipe", 2, 3), ("gpipe", 3, 2), ("gpipe", 1, 2)),
    *(("1f1b", 2, 1), ("1f1b", 2, 3), ("1f1b", 3, 2), ("1f1b", 3, 3)),
    *(("interleaved-1f1b", 1, 2), ("interleaved-1f1b", 2, 2), ("interleaved-1f1b", 2, 4)),
]
WHOLE = [build(*shape) for shape in SHAPES]
VALID = WHOLE + [split_backward(schedule) for schedule in WHOLE if schedule.num_actions <= 24]

Edit = tuple[str, int, int, int]  # what to do, and three numbers that say where
EDITS = ("swap", "swap neighbours", "drop", "repeat", "move", "op", "stage", "micro-batch", "join")


def corrupted(schedule: Schedule, edits: Sequence[Edit]) -> Schedule:
    orders = [list(order) for order in schedule.orders]
    for edit in edits:
        _corrupt(orders, edit)
    return replace(schedule, orders=tuple(map(Order.of, orders)))


def _corrupt(orders: list[list], edit: Edit) -> None:
    what, a, b, c = edit
    order = orders[a % len(orders)]
    if not order:
        return
    i, j = b % len(order), c % len(order)
    entry = order[i]
    if what == "swap":
        order[i], order[j] = order[j], order[i]
    elif what == "swap neighbours":
        order[i - 1], order[i] = order[i], order[i - 1]
    elif what == "drop":
        del order[i]
    elif what == "repeat":
        order.insert(j, entry)
    elif what == "move":
        del order[i]
        target = orders[c % len(orders)]
        target.insert(b % (len(target) + 1), entry)
    elif what == "join":
        if i and isinstance(entry, Action) and isinstance(order[i - 1], Action):
            order[i - 1 : i + 1] = [Overlap(order[i - 1], entry)]
    elif isinstance(entry, Action):
        change = {
            "op": {"op": Op(c % 4)},
            "stage": {"stage": entry.stage + (-1, 1)[c % 2]},
            "micro-batch": {"microbatch": entry.microbatch + (-1, 1)[c % 2]},
        }
        order[i] = entry._replace(**change[what])


def agree(schedule: Schedule) -> list[bool]:
    """The verdicts for receive pools of 0, 1 and 2, on which both judges agree."""
    verdicts = [accepts(schedule, pool) for pool in (0, 1, 2)]
    assert [not verify(schedule, receive_pool=pool) for pool in (0, 1, 2)] == verdicts, schedule
    return verdicts


@pytest.mark.parametrize("schedule", VALID, ids=lambda schedule: f"{schedule.name}-{schedule.num_ranks}")
def test_both_accept_the_published_schedules(schedule):
    assert agree(schedule)[1:] == [True, True]


def test_both_agree_on_random_corruptions():
    rng = random.Random(0)
    verdicts = Counter()
    for _ in range(600):
        edits = [random_edit(rng) for _ in range(rng.choice((1, 1, 2)))]
        verdicts.update(agree(corrupted(rng.choice(VALID), edits)))
    assert min(verdicts[True], verdicts[False]) > 200  # neither answer is a habit


def random_edit(rng: random.Random) -> Edit:
    return rng.choice(EDITS), rng.randrange(1000), rng.randrange(1000), rng.randrange(1000)


numbers = st.integers(0, 999)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(VALID), st.lists(st.tuples(st.sampled_from(EDITS), numbers, numbers, numbers), max_size=3))
def test_both_agree_on_found_corruptions(schedule, edits):
    agree(corrupted(schedule, edits))


def test_both_agree_on_random_orders_over_other_routes():
    rng = random.Random(1)
    verdicts = Counter()
    for _ in range(400):
        verdicts[tuple(agree(random_schedule(rng)))] += 1
    # Some run whatever the pool, some need one of 1 or of 2, some need more.
    assert set(verdicts) == {(True, True, True), (False, True, True), (False, False, True), (False, False, False)}


def random_schedule(rng: random.Random) -> Schedule:
    """A complete schedule in micro-batch order whose actions follow their inputs, on some placement."""
    p = rng.choice((2, 3))
    routes, m = rng.choice(
        [
            ((tuple(range(p)), tuple(reversed(range(p)))), 2),
            ((tuple(vee(stage, p) for stage in range(2 * p)),), 2),
            ((tuple(rng.randrange(p) for _ in range(p)),), 4),
            ((tuple(range(p)),), 4),
            (((0, 1, 0),), 6),
        ]
    )
    blank = Schedule((Order.of(()),) * p, routes, tuple(i % len(routes) for i in range(m)))
    orders: list[list[Action]] = [[] for _ in range(p)]
    for action in _shuffled(rng, blank):
        orders[blank.rank_of(action.stage, action.microbatch)].append(action)
    return replace(blank, orders=tuple(map(Order.of, orders)))


def _shuffled(rng: random.Random, schedule: Schedule) -> Iterator[Action]:
    """All F and B in a random order in which inputs come first and micro-batches ascend."""
    here: set = set()
    lines = [
        [Action(stage, op, i) for i in range(schedule.num_microbatches) if schedule.route_of[i] == route]
        for route in range(len(schedule.routes))
        for stage in range(schedule.num_stages)
        for op in (Op.F, Op.B)
    ]
    eager = rng.choice((False, True))
    while any(lines):
        ready = [
            line
            for line in lines
            if line and all((*need, line[0].microbatch) in here for need in needs(line[0], schedule.num_stages))
        ]
        forward = [line for line in ready if line[0].op is Op.F]
        stage, op, i = action = rng.choice(forward if eager and forward else ready).pop(0)
        here.add((0 if op is Op.F else 1, stage, i))
        yield action
