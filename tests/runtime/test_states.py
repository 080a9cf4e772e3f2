"""What the watchdog concludes from what ranks say of themselves."""

from __future__ import annotations

from pipeswift.runtime.process import Condition
from pipeswift.runtime.states import Fault, Sighting, State, find_fault, table

ALIVE, STOPPED, GONE, UNKNOWN = Condition.ALIVE, Condition.STOPPED, Condition.GONE, Condition.UNKNOWN
IDLE = State(call=3, phase="", joins="", still=9.0, last="", doing="its own program", waits=())


def seen(state: State | None, condition: Condition = ALIVE, age: float = 0.0) -> Sighting:
    return Sighting("host:1", condition, state, age)


def busy(doing: str = "busy: F of stage 1, micro-batch 0", **changes) -> State:
    return IDLE._replace(phase="step 2", doing=doing, **changes)


def waits(*ranks: int, **changes) -> State:
    return busy(f"waits: rank {ranks[0]}", waits=ranks, **changes)


def joins(**changes) -> State:
    return busy("waits for all ranks: the losses", joins="the losses", **changes)


def culprits(*ranks: Sighting) -> tuple[int, ...] | None:
    fault = find_fault(ranks, patience=5.0)
    return fault and fault.culprits


def test_nothing_is_wrong_while_some_rank_moves():
    assert culprits(seen(waits(1)), seen(busy(still=4.9))) is None


def test_idling_between_steps_is_no_fault():
    assert culprits(seen(IDLE), seen(IDLE)) is None
    assert culprits(seen(IDLE._replace(phase="start-up")), seen(IDLE)) is None


def test_the_chain_of_waits_ends_at_the_culprit():
    assert culprits(seen(waits(1)), seen(waits(2)), seen(busy())) == (2,)
    assert culprits(seen(waits(1)), seen(IDLE), seen(waits(1))) == (1,)
    assert culprits(seen(joins()), seen(busy()), seen(joins())) == (1,)
    assert culprits(seen(joins(call=4)), seen(joins(call=5)), seen(busy(call=4))) == (2,), "rank 1 is ahead"


def test_who_waits_for_an_all_to_all_waits_for_those_that_are_not_there():
    there = busy("waits: counts with ranks 0, 1, 2", waits=(0, 1, 2))
    assert culprits(seen(there), seen(there), seen(busy())) == (2,)
    assert culprits(seen(there), seen(waits(3)), seen(there), seen(busy())) == (3,)


def test_a_circle_of_waits_names_all_in_it():
    assert culprits(seen(waits(1)), seen(waits(2)), seen(waits(1))) == (1, 2)


def test_ranks_in_different_calls():
    fault = find_fault([seen(waits(1)), seen(waits(0)._replace(phase="evaluation"))], patience=5.0)
    assert fault is not None
    assert fault.culprits == (0, 1)
    assert "rank 0 is in step 2, but rank 1 is in evaluation" in fault.text


def test_a_missing_heartbeat_counts_between_steps_too():
    assert culprits(seen(IDLE), seen(IDLE, age=5.0)) == (1,)
    assert culprits(seen(IDLE), seen(IDLE, STOPPED, age=4.9)) is None
    assert culprits(seen(IDLE), seen(IDLE, GONE)) == (1,)
    assert culprits(seen(IDLE), seen(IDLE._replace(left=True), GONE, age=9.0)) is None


def test_a_host_that_was_never_heard_is_not_judged():
    assert culprits(seen(waits(1)), seen(None, UNKNOWN, age=9.0)) is None
    assert culprits(seen(waits(1)), seen(None, ALIVE, age=9.0)) == (1,)


def test_a_failure_matters_to_those_in_the_same_call():
    failed = IDLE._replace(error="step 2: ValueError: boom", still=1.0)
    assert culprits(seen(busy()), seen(failed)) == (1,)
    assert culprits(seen(busy()), seen(failed._replace(still=0.9))) is None, "it may try again"
    assert culprits(seen(failed), seen(failed)) is None, "all raised the same, and may go on"
    assert culprits(seen(busy(call=4, still=0.0)), seen(failed)) is None, "the others got over it"


def test_a_rank_that_waits_for_itself():
    # "ranks 0, which waits for 0" helped nobody.
    lacks = "F of stage 2, micro-batch 0 needs the output of stage 1 from rank 0"
    fault = find_fault([seen(busy(f"waits: {lacks}", waits=(0,)))], patience=5.0)
    assert fault is not None
    assert fault.culprits == (0,)
    assert fault.text.endswith(f"rank 0 waits for itself: {lacks}, which is yet to run")


def test_a_rank_that_left_while_others_need_it():
    left = IDLE._replace(left=True)
    assert culprits(seen(waits(1)), seen(left, age=99.0)) == (1,)
    assert culprits(seen(busy(lost=True, still=1.0)), seen(left)) == (1,), "at once, as the connection is gone"


def test_the_table_has_a_line_per_rank_and_marks_the_culprit():
    first = waits(1)._replace(last="F of stage 0, micro-batch 2", still=2.0)
    ranks = [seen(first, age=0.5), seen(busy("busy: F"), STOPPED, age=6.0), seen(None, age=6.0)]
    fault = find_fault(ranks[:2], patience=5.0)
    assert fault is not None
    assert fault.text == "rank 1 is stopped: nothing heard of its process host:1 for 6.0 s"
    assert table(ranks, fault).splitlines() == [
        "rank  process  in      still for  last done                    now",
        "0     host:1   step 2  2.5 s      F of stage 0, micro-batch 2  waits: rank 1",
        "1 !   host:1   step 2  15.0 s     -                            stopped; before: busy: F",
        "2     host:1   ?       6.0 s      ?                            no word yet",
    ]


def test_with_replicas_the_table_says_which_rank_of_which_pipeline_each_is():
    ranks = [seen(waits(2)), seen(IDLE), seen(busy("busy: F")), seen(IDLE)]
    lines = table(ranks, Fault((2,), ""), replicas=2).splitlines()
    assert [line[:16].rstrip() for line in lines[1:]] == [
        "0 (pp 0, dp 0)",
        "1 (pp 0, dp 1)",
        "2 (pp 1, dp 0) !",
        "3 (pp 1, dp 1)",
    ]
