"""Swift, question by question: what a rank that knows this much starts next, and by which rule."""

from math import inf

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action, F, I, Product, Schedule, W
from pipeswift.policy import Calibration, Decision, Prices, Ready, Rule, Rules, Summary, Swift, View, slots_of
from pipeswift.policy.diary import tally
from pipeswift.schedules import build
from pipeswift.simulate import factors, replay, run, varied
from pipeswift.trace import makespan
from tests.simulate.written import starts, written

OUTPUT, GRADIENT = Product.OUTPUT, Product.GRADIENT
STEADY = Calibration({}, {0: 0.0})
HINT = written("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2")


class Rank:
    """One rank of HINT on which every pass takes a second."""

    def __init__(self, rank: int, calibration: Calibration | None = None, slots: int = 3, **options):
        self.policy = Swift(HINT, {(0, 0): slots, (1, 0): slots}, calibration=calibration, **options)
        self.ready = Ready(HINT, rank, {(0, 0): slots, (1, 0): slots})
        self.rank, self.monitor, self.now, self.started = rank, self.policy.monitor(rank), 0.0, 0

    def does(self, *actions: Action) -> "Rank":
        for action in actions:
            assert action in self.ready
            self.ready.start(action)
            self.ready.finish(action)
            self.monitor.ended(action, 1.0)
            self.now, self.started = self.now + 1.0, self.started + 1
        return self

    def gets(self, product: Product, stage: int, *microbatches: int) -> "Rank":
        for microbatch in microbatches:
            self.ready.arrive(product, stage, microbatch)
        return self

    def hears(self, action: Action, until: float, depth: int = 0) -> "Rank":
        self.monitor.hear(Summary(1 - self.rank, action, self.now, until, 0.0, depth), self.now)
        return self

    def asked(self, after: float = 0.0) -> Decision:
        return self.policy.next(self.ready, View(self.rank, self.now + after, self.started, self.now, self.monitor))


def test_starves_when_nothing_is_ready():
    assert Rank(1).asked() == Decision(None, Rule.STARVE)


class TestFollow:
    def test_what_the_hint_says_and_is_ready_is_started(self):
        assert Rank(0).asked() == Decision(F(0, 0), Rule.FOLLOW)

    def test_in_steady_times_the_hint_s_next_is_waited_for(self):
        rank = Rank(0, STEADY).does(F(0, 0), F(0, 1))
        assert F(0, 2) in rank.ready
        assert rank.asked()[:2] == (None, Rule.FOLLOW)

    def test_not_with_fewer_slots_than_the_hint_needs(self):
        rank = Rank(1, STEADY, slots=1).gets(OUTPUT, 0, 0)
        assert rank.asked().rule is Rule.FOLLOW
        assert Rank(0, STEADY, slots=1).does(F(0, 0)).asked().rule is Rule.STARVE


class TestAdvance:
    def test_an_action_overtakes_those_that_cannot_run(self):
        assert Rank(0).does(F(0, 0), F(0, 1)).asked() == Decision(F(0, 2), Rule.ADVANCE)

    def test_not_beyond_the_slots(self):
        assert Rank(0, slots=2).does(F(0, 0), F(0, 1)).asked() == Decision(None, Rule.STARVE)

    def test_off(self):
        rank = Rank(0, rules=Rules(advance=False)).does(F(0, 0), F(0, 1))
        assert rank.asked()[:2] == (None, Rule.FOLLOW)

    def test_of_two_the_cheaper_one(self):
        # I1 and W0 are both here, F1 is not: the I is one place further ahead.
        rank = Rank(1).gets(OUTPUT, 0, 0).does(F(1, 0), I(1, 0)).gets(OUTPUT, 0, 1).does(F(1, 1))
        assert rank.asked() == Decision(W(1, 0), Rule.FOLLOW)
        dear = Rank(1, prices=Prices(weight=1.0)).gets(OUTPUT, 0, 0).does(F(1, 0), I(1, 0))
        assert dear.gets(OUTPUT, 0, 1).does(F(1, 1)).asked() == Decision(I(1, 1), Rule.ADVANCE)


class TestHold:
    def rank(self, **options) -> Rank:
        """Two F are done, I0 is next, and F2 could run meanwhile."""
        return Rank(0, prices=Prices(place=0.5), **options).does(F(0, 0), F(0, 1))

    def test_an_arrival_that_is_near_is_waited_for(self):
        rank = self.rank().hears(I(1, 0), until=2.3)
        entry, rule, until = rank.asked()
        assert (entry, rule) == (None, Rule.HOLD)
        assert until > 2.3

    def test_not_one_that_is_far_away_or_unknown(self):
        assert self.rank().hears(I(1, 0), until=4.5).asked().rule is Rule.ADVANCE
        assert self.rank().hears(I(1, 1), until=2.3).asked().rule is Rule.ADVANCE

    def test_the_later_it_is_the_longer_it_is_taken_to_last(self):
        rank = self.rank().hears(I(1, 0), until=2.3)
        until = rank.asked().until
        assert rank.asked(after=until - rank.now).entry == F(0, 2)

    def test_off(self):
        assert self.rank(rules=Rules(hold=False)).hears(I(1, 0), until=2.3).asked().rule is Rule.ADVANCE

    def test_not_where_slots_abound(self):
        assert self.rank(slots=4).hears(I(1, 0), until=2.3).asked().rule is Rule.ADVANCE


class TestThrottle:
    def test_a_w_goes_before_an_f_that_the_next_stage_has_no_use_for(self):
        def rank(depth: int) -> Rank:
            made = Rank(0, rules=Rules(crowd=2)).does(F(0, 0)).gets(GRADIENT, 1, 0).does(I(0, 0))
            return made.hears(I(1, 0), until=0.0, depth=depth)

        assert rank(depth=1).asked() == Decision(F(0, 1), Rule.FOLLOW)
        assert rank(depth=2).asked() == Decision(W(0, 0), Rule.THROTTLE)

    def test_from_half_the_queue_on_where_the_next_stage_swings(self):
        def rank(swing: float) -> Rank:
            made = Rank(0, Calibration({}, {0: 0.0, 1: swing}), rules=Rules(crowd=4))
            return made.does(F(0, 0)).gets(GRADIENT, 1, 0).does(I(0, 0)).hears(I(1, 0), until=0.0, depth=2)

        assert rank(swing=0.1).asked().rule is Rule.FOLLOW
        assert rank(swing=0.3).asked() == Decision(W(0, 0), Rule.THROTTLE)

    def test_never_without_a_w(self):
        assert Rank(0, rules=Rules(crowd=1)).hears(I(1, 0), until=0.0, depth=9).asked().entry == F(0, 0)


class TestForce:
    def test_after_long_waiting_the_oldest_ready_action_runs(self):
        rank = Rank(0, STEADY, rules=Rules(patience=2.0)).does(F(0, 0), F(0, 1))
        assert rank.asked() == Decision(None, Rule.FOLLOW, until=6.0)
        assert rank.asked(after=4.0) == Decision(F(0, 2), Rule.FORCE)

    @pytest.mark.parametrize("p", [4, 16])
    def test_not_for_a_way_there_and_back(self, p):
        schedule = build("zb-h1", p, 2 * p)
        trace = run(
            schedule, Costs.uniform(p), Swift(schedule, {(stage, 0): p for stage in range(p)}, calibration=STEADY)
        )
        assert list(tally(trace.counters, p)) == ["follow"]

    def test_never_with_endless_patience(self):
        rank = Rank(0, STEADY, rules=Rules(patience=inf)).does(F(0, 0), F(0, 1))
        assert rank.asked(after=1e6) == Decision(None, Rule.FOLLOW, until=inf)


def test_same_facts_same_answer():
    rank = Rank(0).does(F(0, 0), F(0, 1)).hears(I(1, 0), until=2.1)
    assert rank.asked() == rank.asked()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dualpipe", "policy swift needs a schedule with one route: dualpipe has 2. Use policy follow"),
        ("dualpipe-v", "policy swift cannot part woven pairs: dualpipe-v has Overlaps. Use policy follow"),
    ],
)
def test_schedules_that_it_cannot_have(name, message):
    with pytest.raises(PipeSwiftError, match=message):
        Swift(build(name, 4, 8))


class TestInASimulation:
    def times(self, schedule: Schedule, sigma: float, seeds: int) -> tuple[list[float], list[float]]:
        """Makespans of the schedule's order and of swift with it as its hint."""
        p, m = schedule.num_ranks, schedule.num_microbatches
        slots = {(stage, 0): max(slots_of(schedule).values()) for stage in range(p)}
        drawn = [varied(Costs.uniform(p, W=0.8, comm=0.02), factors(seed, p, m, sigma)) for seed in range(seeds)]
        policy = Swift(schedule, slots)
        return (
            [makespan(replay(schedule, costs)) for costs in drawn],
            [makespan(run(schedule, costs, policy, slots)) for costs in drawn],
        )

    @pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v"])
    def test_after_a_calm_calibration_steady_times_give_the_hint_itself(self, name):
        schedule = build(name, 4, 8)
        costs = Costs.uniform(schedule.num_stages, W=0.8, comm=0.02)
        trace = run(schedule, costs, Swift(schedule, calibration=STEADY))
        assert starts(trace) == starts(replay(schedule, costs))
        assert list(tally(trace.counters, 4)) == ["follow"]

    @pytest.mark.parametrize(("name", "least"), [("1f1b", 1.02), ("zb-h1", 1.02), ("zb-h2", 1.01)])
    def test_where_times_swing_it_beats_the_order_that_it_is_given(self, name, least):
        static, ours = self.times(build(name, 8, 16), sigma=0.8, seeds=6)
        assert np.median(static) > least * np.median(ours)

    def test_a_frozen_rank_recovers_by_force(self):
        schedule = build("zb-h1", 4, 8)
        costs = Costs.uniform(4, W=0.8, comm=0.02)
        seconds = np.repeat(costs.seconds, 8, axis=2)
        seconds[0, 2, 3] = 40.0
        frozen = varied(costs, seconds[0] / costs.seconds[0])
        trace = run(schedule, frozen, Swift(schedule, calibration=STEADY, rules=Rules(patience=0.8)))
        assert "force" in tally(trace.counters, 4)
        assert len(trace) == schedule.num_actions

    def test_a_policy_leaves_nothing_behind(self):
        schedule = build("zb-h1", 4, 8)
        costs = varied(Costs.uniform(4, comm=0.02), factors(0, 4, 8, 0.8))
        policy = Swift(schedule)
        assert starts(run(schedule, costs, policy)) == starts(run(schedule, costs, policy))
