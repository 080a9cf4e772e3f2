"""The policy that adapts: the hint ranks what is ready, and what is known to be on its way may be worth a wait."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import inf

from pipeswift.ir import Action, Op, Schedule, parts
from pipeswift.policy.agreement import Agreed
from pipeswift.policy.base import Decision, Policy, Rule, View
from pipeswift.policy.hint import check_hint
from pipeswift.policy.monitor import Alarm, Calibration, Monitor
from pipeswift.policy.ready import Ready, Slots, slots_of


@dataclass(frozen=True)
class Prices:
    """What a choice costs, in mean passes of the rank.

    Each place that an action is ahead of the next in the hint has a price, a W's places less than others', but a W has
    one as such; so has a wait, besides its length. The cheapest choice is taken.
    """

    place: float = 0.15
    weight_place: float = 0.04
    weight: float = 0.26
    hold: float = 0.04


@dataclass(frozen=True)
class Rules:
    """Which rules are on. patience: mean passes, for each stage of the pipeline, since a message's way there and back
    is an ordinary wait, after which a waiting rank runs the oldest ready action.

    crowd: F waiting at the next stage from which on a W goes before an F; None never throttles.
    """

    follow: bool = True
    advance: bool = True
    hold: bool = True
    crowd: int | None = None
    patience: float = 2.5


class Swift(Policy):
    """Leaves the order of `hint` where stage times swing.

    hint: a schedule that flushes, with one route and without Overlaps; PipeSwiftError for others.
    slots: in-flight limits by (stage, route); by default what the hint needs.
    """

    def __init__(
        self,
        hint: Schedule,
        slots: Slots | None = None,
        *,
        prices: Prices = Prices(),
        rules: Rules = Rules(),
        alarm: Alarm = Alarm(),
        calibration: Calibration | None = None,
    ):
        check_hint("swift", hint)
        needed = slots_of(hint)
        slots = needed if slots is None else slots
        self._prices, self._rules, self._alarm, self._calibration = prices, rules, alarm, calibration
        self._rank_of = hint.routes[0]
        self._last = hint.num_stages - 1
        self._orders = [tuple(part for entry in order for part in parts(entry)) for order in hint.orders]
        self._places = [dict(zip(order, count())) for order in self._orders]
        self._slots = [slots[stage, 0] for stage in range(hint.num_stages)]
        # With as many slots as the hint needs, its first unstarted action over all ranks can always run.
        self._may_follow = rules.follow and all(slots[place] >= most for place, most in needed.items())
        self._crowds = [_crowd(rules, alarm, calibration, stage) for stage in range(hint.num_stages)]
        self._patience = rules.patience * hint.num_stages
        ranks = hint.num_ranks
        # Waiting pays where slots are scarce: with twice as many as ranks, there is always work in between.
        self._scarcity = [min(max(2.0 - held / ranks, 0.0), 1.0) for held in self._slots]
        self._holds = rules.hold and any(self._scarcity)

    def monitor(self, rank: int) -> Monitor:
        return Monitor(rank, self._calibration, self._alarm)

    def next(self, ready: Ready, view: View) -> Decision:
        first = ready.first(self._orders[view.rank])
        if first is None:
            return STARVE
        monitor = view.monitor
        assert monitor is not None, "the clock gives the monitor that this policy made"
        if first.op is not Op.W and first in ready:  # costs nothing, so nothing is cheaper
            return self._throttled(first, ready, view, monitor) or Decision(first, Rule.FOLLOW)
        patience = view.idle_since + self._patience * monitor.unit
        waited = view.now >= patience  # never while the unit is nan
        if self._may_follow and monitor.steady and not waited:
            return Decision(first if first in ready else None, Rule.FOLLOW, patience)
        places = self._places[view.rank]
        line = [action for action in ready.next_in_line() if action in places]  # no B where the hint has I and W
        able = [action for action in line if action in ready]
        if not able:
            return STARVE
        if first not in able:
            if waited:
                return Decision(min(able, key=_age), Rule.FORCE)
            if not self._rules.advance:
                return Decision(None, Rule.FOLLOW, patience)
        due = places[first]
        price, choice = min((self._price(places[action] - due, action), action) for action in able)
        # Over a group, news of one member says little of when all of them will be ready.
        if self._holds and not waited and not isinstance(ready, Agreed):
            until = min(self._worth_a_wait(price, line, ready, view, monitor), patience)
            if until > view.now:
                return Decision(None, Rule.HOLD, until)
        if choice == first:
            return Decision(choice, Rule.FOLLOW)
        return self._throttled(choice, ready, view, monitor) or Decision(choice, Rule.ADVANCE)

    def ahead(self, ready: Agreed, view: View, running: Action) -> Action | None:
        """The hint's next, where the group will not wait for it: it is ready, or will be when `running` has ended.

        While times are steady it is the next whatever happens; and what is the only one that can be, is.
        """
        first, monitor = ready.first(self._orders[view.rank]), view.monitor
        if first is None:
            return None
        assert monitor is not None
        if ready.ready_on_all(first) or (self._may_follow and monitor.steady):
            return first
        if self._arrival(first, ready, monitor) <= view.now + monitor.expected(running):
            return first
        places = self._places[view.rank]
        options = [action for action in ready.may_come() if action in places]
        return options[0] if len(options) == 1 else None

    def _price(self, ahead: int, action: Action) -> float:
        prices = self._prices
        return prices.weight + prices.weight_place * ahead if action.op is Op.W else prices.place * ahead

    def _worth_a_wait(self, price: float, line: list[Action], ready: Ready, view: View, monitor: Monitor) -> float:
        """Until when to wait rather than pay `price`; 0 for not at all.

        Once a message is overdue, it is taken to be as far ahead as it is late.
        """
        latest = 0.0
        for action in line:
            if (scarcity := self._scarcity[action.stage]) and action.op is not Op.W and action not in ready:
                arrival = self._arrival(action, ready, monitor)
                affordable = (price * scarcity - self._prices.hold) * monitor.unit
                if abs(arrival - view.now) < affordable:
                    latest = max(latest, arrival + affordable)
        return latest

    def _arrival(self, action: Action, ready: Ready, monitor: Monitor) -> float:
        """When what the action lacks will be here; inf unless another rank is known to be making it."""
        stage, op, microbatch = action
        if op is Op.F:
            if stage == 0 or ready.free_slots(stage, 0) <= 0:
                return inf
            return monitor.end_of(self._rank_of[stage - 1], stage - 1, FORWARDS, microbatch)
        if stage == self._last:
            return inf
        return monitor.end_of(self._rank_of[stage + 1], stage + 1, BACKWARDS, microbatch)

    def _throttled(self, choice: Action, ready: Ready, view: View, monitor: Monitor) -> Decision | None:
        """To run a ready W instead of an F that the next stage has no use for yet."""
        if choice.op is not Op.F or choice.stage == self._last:
            return None
        if (crowd := self._crowds[choice.stage + 1]) is None:
            return None
        if monitor.depth(self._rank_of[choice.stage + 1]) < crowd:
            return None
        places = self._places[view.rank]
        weights = [action for action in ready if action.op is Op.W and action in places]
        return Decision(min(weights, key=places.__getitem__), Rule.THROTTLE) if weights else None


STARVE = Decision(None, Rule.STARVE)
FORWARDS, BACKWARDS = (Op.F,), (Op.I, Op.B)


def _age(action: Action) -> tuple[int, int]:
    """Older micro-batches first; of one micro-batch, what is closer to its end."""
    return action.microbatch, -action.op


def _crowd(rules: Rules, alarm: Alarm, calibration: Calibration | None, stage: int) -> int | None:
    """From which queue on a stage has enough to do: half as long a one where its times swing most."""
    swings = calibration is not None and calibration.swing.get(stage, 0.0) > alarm.sensitive
    return max(rules.crowd // 2, 1) if rules.crowd is not None and swings else rules.crowd
