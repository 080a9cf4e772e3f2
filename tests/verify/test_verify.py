import time
from dataclasses import replace

import numpy as np
import pytest

from pipeswift.codec import from_csv
from pipeswift.ir import Action, B, F, Op, Order, Schedule
from pipeswift.passes import split_backward
from pipeswift.schedules import build, entries, gpipe, interleaved, one_f_one_b
from pipeswift.verify import InvalidSchedule, check, peak_activations, verify


def sentences(schedule: Schedule, **options) -> list[str]:
    return list(map(str, verify(schedule, **options)))


@pytest.mark.parametrize("found", entries(), ids=lambda found: found.name)
@pytest.mark.parametrize("pool", [1, 2])
def test_every_generator_runs(found, pool):
    for p in (1, 2, 3, 4, 7, 8):
        for m in (1, 2, 3, 4, 5, 8, 16, 21):
            for v in (1, 2, 3, 4) if found.any_chunks else (found.chunks,):
                if all(rule.holds(p, m) for rule in found.rules):
                    schedule = build(found.name, p, m, v)
                    assert verify(schedule, receive_pool=pool) == []
                    assert verify(split_backward(schedule), receive_pool=pool) == []


def test_a_large_schedule_is_judged_in_about_a_second():
    schedule = one_f_one_b(64, 512)
    start = time.process_time()
    assert verify(schedule, memory_limit=64) == []
    assert time.process_time() - start < 1.5


# Deadlock


def test_sends_that_cross_without_a_posted_receive():
    (violation,) = verify(one_f_one_b(2, 2), receive_pool=0)
    assert (violation.rank, violation.action, violation.kind) == (0, F(0, 1), "deadlock")
    assert violation.sentence == (
        "rank 0 after 0F1 waits to send it until rank 1 comes to 1F1; "
        "rank 1 after 1B0 waits to send it until rank 0 comes to 0B0: "
        "a receive pool of 0 is too small for this schedule, 1 is enough"
    )


def test_a_send_in_front_of_the_receive_that_the_other_side_waits_for():
    (violation,) = verify(interleaved(2, 4, 2), receive_pool=0)
    assert violation.sentence == (
        "rank 0 after 0F1 waits to send it until rank 1 comes to 1F1; "
        "rank 1 after 1F0 waits to send it until rank 0 comes to 2F0: "
        "a receive pool of 0 is too small for this schedule, 1 is enough"
    )


def test_ranks_that_need_each_other():
    schedule = from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    (violation,) = verify(schedule)
    assert (violation.rank, violation.action) == (0, B(0, 0))
    assert violation.sentence == (
        "rank 0 at 0B0 waits for 1B0 from rank 1; rank 1 at 1F1 waits for 0F1 from rank 0: "
        "no receive pool is large enough, since the actions themselves need each other"
    )


def test_a_pool_that_fills_up():
    # Rank 0 runs stages 0 and 2, and takes back what rank 1 made only when it is through with stage 0.
    schedule = from_csv(
        "0F0,0F1,0F2,0F3,0F4,2F0,2F1,2F2,2F3,2F4,2B0,2B1,2B2,2B3,2B4,0B0,0B1,0B2,0B3,0B4\n"
        "1F0,1F1,1F2,1F3,1F4,1B0,1B1,1B2,1B3,1B4\n"
    )
    (violation,) = verify(schedule, receive_pool=1)
    assert violation.sentence == (
        "rank 0 after 0F3 waits to send it until rank 1 starts 1F2 and frees a buffer; "
        "rank 1 after 1F1 waits to send it until rank 0 starts 2F0 and frees a buffer: "
        "a receive pool of 1 is too small for this schedule, 2 is enough"
    )
    assert verify(schedule, receive_pool=2) == []


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("0B0,0F0", "rank 0 at 0B0 waits for 0F0, which it comes to only later itself"),
        ("0F0,0W0,0I0", "rank 0 at 0W0 waits for 0I0, which it comes to only later itself"),
        ("(0F0;0B0)OVERLAP_F_B", "rank 0 at 0B0 waits for 0F0, which it comes to only later itself"),
    ],
)
def test_a_rank_that_waits_for_itself(row, sentence):
    assert sentences(from_csv(row)) == [f"deadlock: {sentence}"]


# Placement, completeness, order


def test_an_action_on_another_rank():
    schedule = replace(gpipe(2, 1), orders=(Order.of([F(0, 0), F(1, 0), B(0, 0)]), Order.of([B(1, 0)])))
    assert sentences(schedule) == ["placement: rank 0 runs 1F0, and stage 1 of that micro-batch is on rank 1"]


@pytest.mark.parametrize(
    ("action", "name"),
    [
        (F(2, 0), "2F0"),
        (F(0, 1), "0F1"),
        (Action(-1, Op.F, 0), "-1F0"),
        (F(0, -1), "0F-1"),
    ],
)
def test_an_action_that_does_not_exist(action, name):
    schedule = replace(gpipe(2, 1), orders=(Order.of([F(0, 0), action, B(0, 0)]), gpipe(2, 1).orders[1]))
    text = f"placement: rank 0 runs {name}, and there are stages 0 to 1 and micro-batches 0 to 0"
    assert sentences(schedule) == [text]


def test_an_op_that_does_not_exist():
    schedule = replace(gpipe(1, 1), orders=(Order(np.array([[0, 0, 0], [0, 3, 0], [0, 7, 0]])),))
    (violation,) = verify(schedule)
    assert violation.action is None
    assert violation.sentence.startswith("rank 0 runs op 7")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("0B0", "0F0 never runs"),
        ("0F0,0F0,0B0", "0F0 runs twice"),
        ("0F0", "0B0 never runs: a backward is one B, or one I and one W"),
        (
            "0F0,0I0",
            "0I0 runs once: a backward is one B, or one I and one W",
        ),
        (
            "0F0,0B0,0W0,0W0",
            "0B0 runs once and 0W0 runs twice: a backward is one B, or one I and one W",
        ),
    ],
)
def test_passes_that_are_missing_or_too_many(row, sentence):
    assert sentences(from_csv(row)) == [f"completeness: {sentence}"]


@pytest.mark.parametrize(
    ("row", "late", "early"),
    [
        ("0F1,0F0,0B0,0B1", "0F0", "0F1"),
        ("0F0,0F1,0B1,0B0", "0B0", "0B1"),
        ("0F0,0F1,0I0,0I1,0W1,0W0", "0W0", "0W1"),
        ("0F0,0F1,0I0,0B1,0W0", "0W0", "0B1"),  # passed, and weight gradients added up in another order than ever
    ],
)
def test_micro_batches_out_of_order(row, late, early):
    text = f"order: rank 0 runs {late} after {early}: micro-batches of one stage go in ascending order"
    assert sentences(from_csv(row)) == [text]


def test_a_whole_backward_is_in_both_orders():
    found = sentences(from_csv("0F0,0F1,0B1,0I0,0W0"))
    assert [text.partition(":")[2] for text in found] == [
        f" rank 0 runs {late} after 0B1: micro-batches of one stage go in ascending order" for late in ("0I0", "0W0")
    ]


def test_routes_have_orders_of_their_own():
    two_way = Schedule(
        orders=(
            Order.of([F(0, 0), F(1, 1), B(1, 1), B(0, 0)]),
            Order.of([F(0, 1), F(1, 0), B(1, 0), B(0, 1)]),
        ),
        routes=((0, 1), (1, 0)),
        route_of=(0, 1),
    )
    assert verify(two_way, receive_pool=1) == []
    assert "deadlock" in {violation.kind for violation in verify(two_way, receive_pool=0)}
    assert peak_activations(two_way).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"orders": ()}, "there is no rank"),
        ({"orders": gpipe(1, 1).orders}, "route 0 puts stage 1 on rank 1, and there are orders for 1 ranks"),
        ({"routes": ()}, "every route needs the same number of stages"),
        ({"routes": ((),)}, "every route needs the same number of stages"),
        ({"routes": ((0, 1), (0,))}, "every route needs the same number of stages"),
        ({"routes": ((0, -1),)}, "route 0 puts stage 1 on rank -1"),
        ({"route_of": ()}, "there is no micro-batch"),
        ({"route_of": (1,)}, "micro-batch 0 takes route 1, and there are 1 routes"),
    ],
)
def test_parts_that_do_not_fit_each_other(changes, text):
    violations = verify(replace(gpipe(2, 1), **changes))
    assert {violation.kind for violation in violations} == {"shape"}
    assert any(text in violation.sentence for violation in violations)


# Memory


def test_the_first_excess_is_named():
    violations = verify(gpipe(2, 8), memory_limit=3)
    assert [(violation.rank, violation.action, violation.kind) for violation in violations] == [
        (0, F(0, 3), "memory"),
        (1, F(1, 3), "memory"),
    ]
    assert violations[0].sentence == (
        "rank 0 holds 4 activations when 0F3 starts, and the limit is 3: a limit of 8 would do for this rank"
    )


def test_the_limit_may_be_reached():
    assert verify(one_f_one_b(4, 8), memory_limit=4) == []
    assert [violation.rank for violation in verify(one_f_one_b(4, 8), memory_limit=3)] == [0]


def test_a_chunk_counts_its_share():
    assert peak_activations(interleaved(4, 8, 2)).tolist() == [5.5, 4.5, 3.5, 2.5]
    assert verify(interleaved(4, 8, 2), memory_limit=5.5) == []
    (violation,) = verify(interleaved(4, 8, 2), memory_limit=5)
    assert (violation.rank, violation.action) == (0, F(0, 6))


def test_activations_live_until_w():
    early, late = from_csv("0F0,0I0,0W0,0F1,0I1,0W1"), from_csv("0F0,0I0,0F1,0I1,0W0,0W1")
    assert peak_activations(early) == 1
    assert peak_activations(late) == 2


@pytest.mark.parametrize("pair", ["0F1;0B0", "0B0;0F1"])
def test_the_parts_of_an_overlap_live_together(pair):
    assert peak_activations(from_csv(f"0F0,({pair})OVERLAP_F_B,0B1")) == 2


# Check


def test_check_prints_what_is_wrong():
    check(one_f_one_b(2, 4))
    schedule = replace(from_csv("0F0,0F1,0F2\n1F0,1F1,1F2"), name="half")
    with pytest.raises(InvalidSchedule) as caught:
        check(schedule)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the schedule half cannot run:"
    assert len(lines) == 1 + len(caught.value.violations) == 7


def test_a_long_list_is_cut():
    with pytest.raises(InvalidSchedule, match=r"\n  and 30 more$"):
        check(Schedule.one_route(lambda rank: [], ranks=1, microbatches=25))
