"""Pipelines that meet in all-to-alls: a pass lasts until its slowest member, in one order, whoever decides it."""

from itertools import product

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.ir import Action, Op
from pipeswift.policy import Swift, calibrate, slots_of
from pipeswift.program import Form, Lane, Part, Program, Work, chunk, compile_action
from pipeswift.schedules import build
from pipeswift.simulate import Deadlock, replay, run_joint
from pipeswift.trace import ALL_TO_ALL, makespan, whole_passes

P, M, MEMBERS = 2, 4, 2


def programs(chunks: int = 1) -> dict[tuple[int, Op], Program]:
    whole = {
        (stage, op): compile_action(Action(stage, op, 0), layout=(Form.MOE,), takes=False, sends=False)
        for stage, op in product(range(P), (Op.F, Op.I, Op.B))
    }
    return {key: chunk(program, chunks) for key, program in whole.items()}


def seconds(loads: np.ndarray):
    """An F: attention 1, experts 1 times the load of (member, stage, micro-batch); all-to-alls .5, counts nothing."""

    def of(member: int, work: Work) -> float:
        if work.lane is Lane.ALL_TO_ALL:
            return 0.0 if work.part is Part.COUNTS else 0.5 / work.chunks
        load = loads[member, work.action.stage, work.action.microbatch]
        return {Part.ATTENTION: 1.0, Part.EXPERTS: load / work.chunks}.get(work.part, 0.0)

    return of


COSTS = [Costs.uniform(P, F=9.0, I=9.0, W=1.0)] * MEMBERS
EVEN = np.ones((MEMBERS, P, M))


def test_with_equal_loads_every_member_does_what_one_pipeline_would():
    for trace in run_joint(build("zb-h1", P, M), COSTS, programs(), seconds(EVEN)):
        alone = replay(build("zb-h1", P, M), Costs.uniform(P, F=3.0, I=3.0, W=1.0))
        assert makespan(trace) == makespan(alone)
        passes = whole_passes(trace)
        for rank in range(P):
            assert passes.on(rank).start.tolist() == alone.on(rank).start.tolist()


def test_a_pass_lasts_until_the_slowest_member_has_its_tokens_back():
    loads = EVEN.copy()
    loads[1, 0, 0] = 3.0  # attention 1, dispatch .5, experts 1 or 3, combine .5
    fast, slow = run_joint(build("1f1b", P, M), COSTS, programs(), seconds(loads))
    for trace in (fast, slow):
        first = whole_passes(trace).on(0)
        assert (first.start[0], first.end[0]) == (0.0, 5.0)
    waits = fast.on(0, ALL_TO_ALL)
    assert (waits.start[2], waits.end[2]) == (2.5, 5.0)  # counts, dispatch, combine: that waits for the other's experts


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_agreement_in_steady_times_costs_at_most_half_a_per_cent(name, chunks):
    schedule = build(name, P, 16)
    even = seconds(np.ones((MEMBERS, P, 16)))
    static = run_joint(schedule, COSTS, programs(chunks), even)
    policy = Swift(schedule, calibration=calibrate(static[0]))
    agreed = run_joint(schedule, COSTS, programs(chunks), even, policy, latency=0.01)
    assert max(map(makespan, agreed)) <= 1.005 * max(map(makespan, static))


def test_a_group_that_nobody_leads_is_a_deadlock():
    schedule = build("1f1b", P, M)

    class Contrary(Swift):
        """Never says that anything may start."""

        def next(self, ready, view):
            return super().next(ready, view)._replace(entry=None)

    with pytest.raises(Deadlock, match="1f1b"):
        run_joint(schedule, COSTS, programs(), seconds(EVEN), Contrary(schedule), slots_of(schedule))
