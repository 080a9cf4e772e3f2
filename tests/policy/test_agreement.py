"""Ranks that meet agree: on one order, within the memory of each, whatever is late, and always to the end."""

from itertools import product

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.ir import Action, F, I, Op, Product, W
from pipeswift.policy import Agreed, Alarm, Rules, Swift, calibrate, slots_of
from pipeswift.policy.agreement import Arrived, Ended, Go
from pipeswift.program import Form, Part, chunk, compile_action
from pipeswift.schedules import build
from pipeswift.simulate import run, run_joint
from pipeswift.trace import Trace, whole_passes
from tests.policy.test_liveness import any_hint, most_in_flight


def pair(name: str = "zb-h1", rank: int = 1) -> tuple[Agreed, Agreed]:
    """Leader and follower on one rank of two, where stage `rank` has experts."""
    schedule = build(name, 2, 4)
    leader, follower = (Agreed(schedule, rank, slots_of(schedule), member, 2, frozenset({rank})) for member in range(2))
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
    assert F(1, 0) not in leader
    follower.arrive(Product.OUTPUT, 0, 0)
    assert F(1, 0) not in follower
    assert deliver(follower, leader) == [Arrived(1, Product.OUTPUT, 0, 0)]
    assert F(1, 0) in leader
    leader.start(F(1, 0))
    assert deliver(leader, follower) == [Go(F(1, 0))]
    assert F(1, 0) in follower


def test_a_promise_goes_before_all_that_needs_agreement_and_after_nothing_else():
    leader, follower = pair()
    for mine in (leader, follower):
        for microbatch in range(2):
            mine.arrive(Product.OUTPUT, 0, microbatch)
    deliver(follower, leader)
    for action in (F(1, 0), I(1, 0)):
        leader.start(action)
        deliver(leader, follower)
        for mine in (leader, follower):
            if mine is follower:
                mine.start(action)
            mine.finish(action)
    leader.promise(F(1, 1))
    deliver(leader, follower)
    for mine in (leader, follower):
        assert list(mine) == [F(1, 1), W(1, 0)]
    with pytest.raises(ValueError, match=r"1I1 started, where 1F1 was due"):
        follower.start(I(1, 1))


def test_a_slot_is_free_once_every_member_has_ended_its_w():
    slots = {(0, 0): 2, (1, 0): 1}
    leader, follower = (Agreed(build("zb-h1", 2, 4), 1, slots, member, 2, frozenset({1})) for member in range(2))
    for mine, microbatch in product((leader, follower), range(2)):
        mine.arrive(Product.OUTPUT, 0, microbatch)
    deliver(follower, leader)
    for action in (F(1, 0), I(1, 0)):
        leader.start(action)
        leader.finish(action)
    leader.start(W(1, 0))
    leader.finish(W(1, 0))
    assert F(1, 1) not in leader
    deliver(leader, follower)
    for action in (F(1, 0), I(1, 0), W(1, 0)):
        follower.start(action)
        follower.finish(action)
    assert Ended(1, W(1, 0)) in deliver(follower, leader)
    assert F(1, 1) in leader


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
    ops = {action.op for order in hint.orders for action in order} - {Op.W}
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
    for rank in range(hint.num_ranks):
        orders = [together(whole_passes(trace).on(rank), meets) for trace in traces]
        assert all(order == orders[0] for order in orders), f"seed {seed}, rank {rank}"


def together(trace: Trace, meets: list[int]) -> list[tuple[int, int, int]]:
    """The passes in which members meet, in their order."""
    passes = zip(trace.stage.tolist(), trace.op.tolist(), trace.microbatch.tolist(), strict=True)
    return [each for each in passes if each[0] in meets and each[1] != Op.W]


def any_costs(random: np.random.Generator, ranks: int, stages: int, m: int) -> Costs:
    swing = np.exp(random.uniform(0, 1.5) * random.normal(size=(4, stages, m)))
    seconds = np.array([1.0, 1.0, 0.8, 1.8])[:, None, None] * swing
    seconds[:, random.integers(stages), random.integers(m)] *= random.choice([1.0, 50.0])  # one that freezes
    latency = random.uniform(0, random.choice([0.02, 1.0, 10.0]), (ranks, ranks))
    return Costs(seconds, np.zeros((4, stages)), np.zeros(stages - 1), latency)
