"""Swift always gets through: whatever the hint, the swings, the memory and the news, and within the memory."""

from itertools import product
from math import inf

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.ir import MAKES, Action, B, F, Op, Order, Schedule, loop, vee
from pipeswift.policy import Alarm, Ready, Rules, Swift, calibrate, slots_of
from pipeswift.simulate import run
from pipeswift.trace import Trace


def test_some_random_runs():
    for seed in range(200):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_random_runs(thousand):
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        check(seed)


def check(seed: int) -> None:
    random = np.random.default_rng(seed)
    hint = any_hint(random)
    stages, m = hint.num_stages, hint.num_microbatches
    swing = np.exp(random.uniform(0, 1.5) * random.normal(size=(4, stages, m)))
    seconds = np.array([1.0, 1.0, 0.8, 1.8])[:, None, None] * swing
    seconds[:, random.integers(stages), random.integers(m)] *= random.choice([1.0, 50.0])  # one that freezes
    latency = random.uniform(0, random.choice([0.02, 1.0, 10.0]), (hint.num_ranks, hint.num_ranks))
    costs = Costs(seconds, np.zeros((4, stages)), np.zeros(stages - 1), latency)
    slots = {(stage, 0): int(random.integers(1, m + 1)) for stage in range(stages)}
    if random.random() < 0.5:  # room for the hint
        slots = {place: max(most, slots[place]) for place, most in slots_of(hint).items()}
    lost, stale = random.choice([0.0, 0.3, 1.0]), random.choice([0.1, 30.0])
    patience = random.choice([0.1, 2.5, inf])
    advance = patience == inf or random.random() < 0.8
    policy = Swift(
        hint,
        slots,
        rules=Rules(
            follow=random.random() < 0.7,
            advance=advance,
            hold=random.random() < 0.8,
            crowd=random.choice([None, 1, 2]),
            patience=patience,
        ),
        alarm=Alarm(threshold=random.choice([0.0, 0.05, 1.0])),
        calibration=calibrate(run(hint, costs)) if random.random() < 0.5 else None,
    )
    trace = run(hint, costs, policy, slots, lambda *_: inf if random.random() < lost else random.exponential(stale))
    actions = sorted(zip(trace.stage.tolist(), trace.op.tolist(), trace.microbatch.tolist(), strict=True))
    assert actions == sorted(tuple(action) for order in hint.orders for action in order), f"seed {seed}"
    for (stage, _), limit in slots.items():
        assert most_in_flight(trace, stage) <= limit, f"seed {seed}, stage {stage}"


def any_hint(random: np.random.Generator) -> Schedule:
    """Any order that can run, of 1 to 8 ranks with 1 to 3 stages each, in a loop or in Vs."""
    p, v, m = random.integers(1, 9), random.integers(1, 4), int(random.integers(1, 6))
    placement, whole = random.choice([loop, vee]), random.random() < 0.3
    stages, route = range(p * v), tuple(placement(stage, p) for stage in range(p * v))
    there_and_back = [F(stage, 0) for stage in stages] + [B(stage, 0) for stage in reversed(stages)]
    once = [Order.of(action for action in there_and_back if route[action.stage] == rank) for rank in range(p)]
    plain = Schedule(tuple(once), (route,), (0,) * m)
    ranks = [Ready(plain, rank, {(stage, 0): m for stage in stages}) for rank in range(p)]
    orders: list[list[Action]] = [[] for _ in ranks]
    unused = Op.I if whole else Op.B
    while open_ranks := [rank for rank, ready in enumerate(ranks) if not ready.finished]:
        rank = int(random.choice(open_ranks))
        able = [action for action in ranks[rank] if action.op is not unused]
        if able:
            action = able[random.integers(len(able))]
            orders[rank].append(action)
            ranks[rank].start(action)
            ranks[rank].finish(action)
            for other, made in product(ranks, MAKES[action.op]):
                if other is not ranks[rank]:
                    other.arrive(made, action.stage, action.microbatch)
    return Schedule(tuple(map(Order.of, orders)), plain.routes, plain.route_of, name="random")


def most_in_flight(trace: Trace, stage: int) -> int:
    """The most micro-batches between the start of F and the end of B or W; an end comes before a start."""
    mine = trace.only(trace.stage == stage)
    begins, ends = mine.start[mine.op == Op.F], mine.end[np.isin(mine.op, (Op.W, Op.B))]
    times = np.concatenate([begins, ends])
    change = np.concatenate([np.ones(len(begins)), -np.ones(len(ends))])
    return int(np.cumsum(change[np.lexsort((change, times))]).max())
