"""The event loop: policies other than following, and what they see."""

from dataclasses import replace

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.policy import Decision, Policy
from pipeswift.schedules import build, pipedream
from pipeswift.simulate import CostsMismatch, Deadlock, replay, run
from pipeswift.trace import busy_per_rank, makespan, peak_memory
from tests.simulate.written import starts, written


class BackwardFirst(Policy):
    """Greedy: a whole backward if one is ready, else a forward."""

    def next(self, ready, view):
        candidates = [action for action in ready if action.op in (Op.F, Op.B)]
        return Decision(max(candidates, key=lambda action: (action.op, -action.microbatch), default=None))


class Never(Policy):
    def next(self, ready, view):
        return Decision(None)


class Asked(Policy):
    """Greedy too; writes down when it was asked what."""

    def __init__(self):
        self.questions = []

    def next(self, ready, view):
        self.questions.append((view.rank, view.now, view.started, [str(action) for action in ready]))
        return BackwardFirst().next(ready, view)


def test_by_default_it_follows_the_schedule():
    schedule, costs = build("1f1b", 4, 8), Costs.uniform(4, comm=0.125)
    assert starts(run(schedule, costs)) == starts(replay(schedule, costs))


def test_backward_first_within_the_slots_of_1f1b_is_1f1b():
    schedule, costs = build("1f1b", 4, 8), Costs.uniform(4)
    assert starts(run(schedule, costs, BackwardFirst())) == starts(replay(schedule, costs))


def test_slots_bound_the_micro_batches_in_flight():
    schedule, costs = build("gpipe", 3, 6), Costs.uniform(3)
    slots = {(stage, 0): 2 for stage in range(3)}
    trace = run(schedule, costs, BackwardFirst(), slots=slots)
    assert peak_memory(trace, costs.memory).max() == 2
    assert len(trace) == schedule.num_actions


def test_a_policy_overtakes_a_late_micro_batch_where_an_order_waits():
    # On rank 0 the first micro-batch's backward is slow to come back, so the greedy policy runs forwards meanwhile.
    schedule = written("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    costs = Costs.uniform(2, comm=1.0)
    greedy = run(schedule, costs, BackwardFirst(), slots={(0, 0): 3, (1, 0): 3})
    assert makespan(greedy) < makespan(replay(schedule, costs))
    assert busy_per_rank(greedy).tolist() == [9.0, 9.0]


def test_a_policy_is_asked_when_its_rank_is_free_and_something_happened_there_until_all_is_done():
    asked = Asked()
    run(written("0F0 0B0", "1F0 1B0"), Costs.uniform(2, comm=0.5), asked)
    assert asked.questions == [
        (0, 0.0, 0, ["0F0"]),
        (1, 0.0, 0, []),
        (0, 1.0, 1, []),
        (1, 1.5, 0, ["1F0"]),
        (1, 2.5, 1, ["1I0", "1B0"]),
        (0, 5.0, 1, ["0I0", "0B0"]),
    ]


def test_all_that_happens_at_a_moment_happens_before_the_question():
    # Rank 1's own F0 ends at 2, just when the second micro-batch arrives: one question, with both facts.
    asked = Asked()
    run(written("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), Costs.uniform(2), asked)
    assert [ready for rank, now, _, ready in asked.questions if (rank, now) == (1, 2.0)] == [["1F1", "1I0", "1B0"]]


def test_ranks_of_a_stage_wait_for_each_other_to_sum_its_gradients():
    # Rank 1 is in 0B1 until 11, and only then is the first update of stage 0 there for rank 0.
    order = pipedream(3, 4, (2, 1))
    seconds = np.ones((4, 2, 4))
    seconds[Op.B, 0, 1] = 6.0
    costs = replace(Costs.uniform(2), seconds=seconds)
    alone, together = starts(run(order, costs)), starts(run(order, costs, updates_every=2))
    assert [alone[action] for action in ("0B0", "0B1", "0B2")] == [3, 5, 7]
    assert [together[action] for action in ("0B0", "0B1", "0B2")] == [3, 5, 11]


class TestDeadlock:
    def test_of_ranks_that_wait_for_each_other_in_a_circle(self):
        rows = "0F0 0B0 0F2 0B2", "0F1 0F3 0B1 0B3", "1F0 1B0 1F2 1F1 1B1 1F3 1B2 1B3"
        order = written(*rows, routes=((0, 2), (1, 2)))
        run(order, Costs.uniform(2))
        with pytest.raises(Deadlock, match="cannot start 0F2: other ranks of a stage have not come to sum"):
            run(order, Costs.uniform(2), updates_every=2)

    def test_of_a_schedule_that_is_followed(self):
        with pytest.raises(Deadlock) as caught:
            run(written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), Costs.uniform(2))
        assert str(caught.value).splitlines()[:2] == [
            "schedule written cannot finish: 2 of 2 ranks are stuck.",
            "  rank 0 cannot start 0F1: all slots of stage 0 are taken",
        ]

    def test_of_a_policy_that_declines(self):
        with pytest.raises(Deadlock, match="rank 0 cannot start 0F0: it is ready, but the policy does not start it"):
            run(build("1f1b", 2, 2), Costs.uniform(2), Never())

    def test_of_a_stage_without_slots(self):
        with pytest.raises(Deadlock, match="rank 1 cannot start 1F0: all slots of stage 1 are taken"):
            run(build("1f1b", 2, 2), Costs.uniform(2), BackwardFirst(), slots={(0, 0): 2, (1, 0): 0})


def test_a_policy_cannot_start_what_is_not_ready():
    class Hasty(Policy):
        def next(self, ready, view):
            return Decision(next(iter(build("1f1b", 2, 1).orders[view.rank])))

    with pytest.raises(ValueError, match=r"started 1F0 on rank 1 at 0\.0"):
        run(build("1f1b", 2, 1), Costs.uniform(2), Hasty())


def test_costs_of_another_schedule_are_refused():
    with pytest.raises(CostsMismatch):
        run(build("1f1b", 2, 2), replace(Costs.uniform(2), seconds=np.ones((4, 3, 1))))
