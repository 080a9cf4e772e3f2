"""Ranks that meet agree: on one order, within the memory of each, whatever is late, and always to the end."""

from itertools import product

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.ir import Action, F, I, Op, Product, W
from pipeswift.policy import Agreed, Alarm, Rules, Swift, calibrate, slots_of
from pipeswift.policy.agreement import Arrived, Go
from pipeswift.program import Form, Part, chunk, compile_action
from pipeswift.schedules import build
from pipeswift.simulate import run, run_joint
from pipeswift.trace import Trace, whole_passes
from tests.policy.test_liveness import any_hint, most_in_flight


def pair(rank: int = 1, slots=None) -> tuple[Agreed, Agreed]:
    """Leader and follower on one rank of two."""
    schedule = build("zb-h1", 2, 4)
    leader, follower = (Agreed(schedule, rank, slots or slots_of(schedule), member, 2) for member in range(2))
    return leader, follower


def deliver(sender: Agreed, receiver: Agreed) -> list:
    sent = list(sender.outbox)
    sender.outbox.clear()
    for message in sent:
        receiver.hear(message)
    return sent


def test_what_has_not_arrived_everywhere_is_ready_nowhere():
    leader, follower = pair()
    leader.arrive(Product.OUTPUT, 0, 0)
    assert list(leader) == []
    follower.arrive(Product.OUTPUT, 0, 0)
    assert list(follower) == []
    assert deliver(follower, leader) == [Arrived(1, Product.OUTPUT, 0, 0)]
    assert list(leader) == [F(1, 0)]
    leader.start(F(1, 0))
    assert deliver(leader, follower) == [Go(F(1, 0))]
    assert list(follower) == [F(1, 0)]


def test_a_promise_goes_before_all_else():
    leader, follower = pair()
    for mine, microbatch in product((leader, follower), range(2)):
        mine.arrive(Product.OUTPUT, 0, microbatch)
    deliver(follower, leader)
    run_both(leader, follower, F(1, 0), I(1, 0))
    leader.promise(F(1, 1))
    deliver(leader, follower)
    for mine in (leader, follower):
        assert mine.next_in_line() == (F(1, 1),)
        assert list(mine) == [F(1, 1)]
    with pytest.raises(ValueError, match="1W0 started, where 1F1 was to come next"):
        follower.start(W(1, 0))


def test_what_is_promised_counts_as_done_in_the_next_choice_and_waits_for_its_own_input():
    leader, follower = pair(slots={(0, 0): 2, (1, 0): 1})
    for microbatch in range(2):
        leader.arrive(Product.OUTPUT, 0, microbatch)
    leader.promise(F(1, 0))  # though the follower cannot run it yet
    deliver(leader, follower)
    assert F(1, 0) in leader
    assert F(1, 0) not in follower
    for microbatch in range(2):
        follower.arrive(Product.OUTPUT, 0, microbatch)
    deliver(follower, leader)
    run_both(leader, follower, F(1, 0))
    assert not leader.ready_on_all(F(1, 1))  # the one slot is taken
    for action in (I(1, 0), W(1, 0)):
        leader.promise(action)
    assert leader.ready_on_all(F(1, 1))


def run_both(leader: Agreed, follower: Agreed, *actions: Action) -> None:
    for action in actions:
        leader.start(action)
        leader.finish(action)
        deliver(leader, follower)
        follower.start(action)
        follower.finish(action)


def test_some_random_groups():
    for seed in range(100):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(3))
def test_three_thousand_random_groups(thousand):
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        check(seed)


def check(seed: int) -> None:
    random = np.random.default_rng(seed)
    hint = any_hint(random)
    stages, m, members = hint.num_stages, hint.num_microbatches, int(random.integers(2, 4))
    meets = [stage for stage in range(stages) if random.random() < 0.7] or [0]
    costs = [any_costs(random, hint.num_ranks, stages, m) for _ in range(members)]
    slots = {(stage, 0): int(random.integers(1, m + 1)) for stage in range(stages)}
    if random.random() < 0.5:  # room for the hint
        slots = {place: max(most, slots[place]) for place, most in slots_of(hint).items()}
    policy = Swift(
        hint,
        slots,
        rules=Rules(follow=random.random() < 0.7, hold=random.random() < 0.8, patience=random.choice([0.1, 2.5])),
        alarm=Alarm(threshold=random.choice([0.0, 0.05, 1.0])),
        calibration=calibrate(run(hint, costs[0])) if random.random() < 0.5 else None,
    )
    ops = {Op(op) for order in hint.orders for op in order.rows[:, 1].tolist()} - {Op.W}
    programs = {
        (stage, op): chunk(compile_action(Action(stage, op, 0), layout=(Form.MOE,), takes=False, sends=False), 2)
        for stage, op in product(meets, ops)
    }
    loads = np.exp(random.normal(size=(members, stages, m)))

    def seconds(member: int, work) -> float:
        load = loads[member, work.action.stage, work.action.microbatch] if work.part is Part.EXPERTS else 1.0
        return 0.1 * load / work.chunks

    traces = run_joint(hint, costs, programs, seconds, policy, slots, latency=random.choice([0.0, 0.01, 3.0]))
    for trace in map(whole_passes, traces):
        passes = sorted(set(zip(trace.stage.tolist(), trace.op.tolist(), trace.microbatch.tolist(), strict=True)))
        assert passes == sorted(tuple(action) for order in hint.orders for action in order), f"seed {seed}"
        for (stage, _), limit in slots.items():
            assert most_in_flight(trace, stage) <= limit, f"seed {seed}, stage {stage}"
    held = [{stage for _, stage in hint.stages_on(rank)} for rank in range(hint.num_ranks)]
    for rank in (rank for rank, mine in enumerate(held) if mine & set(meets)):
        orders = [order_of(whole_passes(trace).on(rank)) for trace in traces]
        assert all(order == orders[0] for order in orders), f"seed {seed}, rank {rank}"


def order_of(trace: Trace) -> list[tuple[int, int, int]]:
    return list(zip(trace.stage.tolist(), trace.op.tolist(), trace.microbatch.tolist(), strict=True))


def any_costs(random: np.random.Generator, ranks: int, stages: int, m: int) -> Costs:
    swing = np.exp(random.uniform(0, 1.5) * random.normal(size=(4, stages, m)))
    seconds = np.array([1.0, 1.0, 0.8, 1.8])[:, None, None] * swing
    seconds[:, random.integers(stages), random.integers(m)] *= random.choice([1.0, 50.0])  # one that freezes
    latency = random.uniform(0, random.choice([0.02, 1.0, 10.0]), (ranks, ranks))
    return Costs(seconds, np.zeros((4, stages)), np.zeros(stages - 1), latency)
