"""The event loop: the timeline of any policy, which decides at each moment from what is ready by then."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import inf, isnan, nan
from typing import NamedTuple

import numpy as np

from pipeswift.cost import Costs
from pipeswift.ir import Action, Op, Overlap, Product, Schedule, needs, parts
from pipeswift.policy import Agreed, Follow, Message, Policy, Ready, Slots, Summary, View, slots_of
from pipeswift.simulate.deadlock import Deadlock, Stuck, misses
from pipeswift.simulate.meetings import Meetings
from pipeswift.simulate.replay import timeline
from pipeswift.simulate.tables import NONE, links, product_of, unmeasured
from pipeswift.simulate.watch import Watch
from pipeswift.trace import COMPUTE, Trace


def run(
    schedule: Schedule,
    costs: Costs,
    policy: Policy | None = None,
    slots: Slots | None = None,
    hearsay: Callable[[Summary, int], float] | None = None,
    updates_every: int | None = None,
) -> Trace:
    """When every action runs if `policy` decides; clock, links and Overlaps as in `replay`; seconds, from 0.

    policy: what each rank starts next; by default it follows the schedule. The schedule says where stages are.
    slots: (stage, route) -> micro-batches in flight there; by default the most that the schedule's own order has.
    The policy is asked whenever a rank with work left is free and something has happened on it: the step began, an
    entry of its own ended, a message arrived, or the moment has come that it asked for; all that happens at one moment
    happens before the questions.
    hearsay: (summary, listening rank) -> seconds until it is there, inf if it is lost; by default the link's latency.
    updates_every: micro-batches per update of a schedule without flush. Ranks that hold one stage then wait for each
        other after their last backward of each update, to sum their gradients (which takes no time itself).
    What a policy with a monitor decided is in the trace: a counter per rank and rule, and the depth of its queue.
    Raises Deadlock when nothing more will happen and a rank has work left, CostsMismatch as `replay` does, ValueError
    when the policy starts what is not ready.
    """
    policy = Follow(schedule) if policy is None else policy
    slots = slots_of(schedule) if slots is None else slots
    ready = [Ready(schedule, rank, slots) for rank in range(schedule.num_ranks)]
    clock = Clock(schedule, costs, ready, policy, hearsay, Meetings(schedule, updates_every))
    play([clock])
    return clock.trace()


def play(clocks: Sequence[Clock]) -> None:
    """Lets everything happen on all of `clocks`, which share their time. Raises Deadlock as `run` does."""
    now, touched = 0.0, [(clock, rank) for clock in clocks for rank in range(clock.schedule.num_ranks)]
    while touched:
        for clock, rank in touched:
            clock.ask(rank, now)
        now = min(clock.next_event for clock in clocks)
        touched = [(clock, rank) for clock in clocks for rank in sorted(set(clock.happen(now)))]
    for clock in clocks:
        clock.require_end()


class Landed(NamedTuple):
    """What `action` made is there."""

    product: Product
    action: Action


class Clock:
    """The state of one pipeline's run: what each rank has done, and the events to come."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        ready: Sequence[Ready],
        policy: Policy,
        hearsay: Callable[[Summary, int], float] | None = None,
        meetings: Meetings | None = None,
    ):
        self.schedule = schedule
        self._costs = costs
        self._links, self._pairs = links(schedule, costs), costs.pairs
        self.ready = ready
        self._started = [0] * schedule.num_ranks
        self._running = [0] * schedule.num_ranks  # actions started and not ended, and meetings
        self._meetings = meetings or Meetings(schedule, None)
        self._spans: list[list[tuple[Action, float, float, int]]] = [[] for _ in range(schedule.num_ranks)]
        self._channel_free: dict[int, float] = {}
        self._policy = policy
        self._idle_since = [0.0] * schedule.num_ranks
        monitors = [policy.monitor(rank) for rank in range(schedule.num_ranks)]
        self._watch = Watch(schedule, costs, monitors, hearsay) if any(monitors) else None
        # (time, number, rank, what): an action that ends there, what another rank's has made, a member's message, or
        # None when the policy wants to be asked.
        self._events: list[tuple[float, int, int, Action | Landed | Message | None]] = []
        self._number = count()

    def trace(self) -> Trace:
        spans = [span for mine in self._spans for span in mine]
        rows = np.array([action for action, *_ in spans], dtype=np.int32).reshape(-1, 3)
        start, end, lane = np.array([rest for _, *rest in spans], dtype=np.float64).reshape(-1, 3).T
        trace = timeline(self.schedule, rows, [len(mine) for mine in self._spans], start, end)
        counters = self._watch.counters() if self._watch else ()
        return replace(trace, lane=lane.astype(np.int32), counters=counters)

    def ask(self, rank: int, now: float) -> None:
        """The policy says what a rank does next, unless it is at work or has done all."""
        ready = self.ready[rank]
        if self._running[rank] or ready.finished:
            return
        monitor = self._watch.monitor(rank, now) if self._watch else None
        view = View(rank, now, self._started[rank], self._idle_since[rank], monitor)
        entry, rule, until = self._policy.next(ready, view)
        if self._watch:
            self._watch.note(rank, now, rule, ready.depth)
        if entry is None:
            if now < until < inf:
                self.push(until, rank, None)
            return
        for action in parts(entry):
            if action not in ready:
                raise ValueError(f"the policy started {entry} on rank {rank} at {now}, where {action} is not ready")
        self._started[rank] += 1
        self.begin(rank, entry, now)
        if self._watch:
            self._watch.tell(rank, parts(entry)[0], now, ready.depth)
        self.promise(rank, parts(entry)[0], view)

    def begin(self, rank: int, entry: Action | Overlap, now: float) -> None:
        """A rank starts an entry, whose times its costs say."""
        for action, start, end in self._times(entry, now):
            self.enter(rank, action)
            self.record(rank, action, start, end)
            self.push(end, rank, action)

    def enter(self, rank: int, action: Action) -> None:
        self.ready[rank].start(action)
        self._running[rank] += 1

    def record(self, rank: int, action: Action, start: float, end: float, lane: int = COMPUTE) -> None:
        self._spans[rank].append((action, start, end, lane))

    def promise(self, rank: int, running: Action, view: View) -> None:
        """A rank that leads others says what comes after what it has started."""
        ready = self.ready[rank]
        if isinstance(ready, Agreed) and ready.open and (action := self._policy.ahead(ready, view, running)):
            ready.promise(action)

    def _times(self, entry: Action | Overlap, now: float) -> Iterator[tuple[Action, float, float]]:
        """(action, start, end) of each part."""
        seconds, woven = self._costs.seconds, nan
        if isinstance(entry, Overlap):
            woven = float(self._pairs[entry.first.stage % len(self._pairs), entry.second.stage % len(self._pairs)])
        for action in parts(entry):
            if not isnan(woven):
                yield action, now, now + woven
            else:
                end = now + float(seconds[action.op, action.stage, action.microbatch % seconds.shape[2]])
                if isnan(end):
                    raise unmeasured(action)
                yield action, now, end
                now = end

    def push(self, time: float, rank: int, what: Action | Landed | Message | None) -> None:
        heapq.heappush(self._events, (time, next(self._number), rank, what))

    @property
    def next_event(self) -> float:
        """When; inf if nothing more will happen."""
        return self._events[0][0] if self._events else inf

    def happen(self, now: float) -> Iterator[int]:
        """Let everything of this moment happen; the ranks that it happened on."""
        while self.next_event <= now < inf:
            _, _, rank, what = heapq.heappop(self._events)
            if isinstance(what, Action):
                yield from self._end(rank, what, now)
            elif isinstance(what, Landed):
                self.ready[rank].arrive(what.product, what.action.stage, what.action.microbatch)
            elif what is not None:
                self._hear(rank, what)
            yield rank

    def _end(self, rank: int, action: Action, now: float) -> Iterator[int]:
        self._idle_since[rank] = now
        self.ready[rank].finish(action)
        self._send(action, now)
        if self._watch:
            self._watch.ended(rank, action, now)
        for released in self._meetings.after(rank, action):
            self._running[released] -= 1
            yield released

    def _hear(self, rank: int, message: Message) -> None:
        ready = self.ready[rank]
        assert isinstance(ready, Agreed)
        ready.hear(message)

    def _send(self, action: Action, now: float) -> None:
        at = self.schedule.route_of[action.microbatch], action.op, action.stage
        product, receiver, channel = product_of(action.op), self._links.receiver[at], self._links.channel[at]
        if product is None or receiver == NONE:
            return
        begin = now if channel == NONE else max(now, self._channel_free.get(int(channel), 0.0))
        sent = begin + float(self._links.transfer[at])
        if channel != NONE:
            self._channel_free[int(channel)] = sent
        self.push(sent + float(self._links.latency[at]), int(receiver), Landed(product, action))

    def require_end(self) -> None:
        """Raises Deadlock while a rank has work left."""
        if stuck := list(self._stuck()):
            raise Deadlock(self.schedule.name, self.schedule.num_ranks, stuck)

    def _stuck(self) -> Iterator[Stuck]:
        """Each unfinished rank's actions next in line; a backward, which could be split or not, appears as B."""
        for rank, ready in enumerate(self.ready):
            if not ready.finished:
                for action in ready.next_in_line():
                    if action.op is not Op.I:
                        yield Stuck(rank, action, tuple(self._reasons(rank, action)))

    def _reasons(self, rank: int, action: Action) -> Iterator[str]:
        ready = self.ready[rank]
        if self._running[rank]:
            yield "other ranks of a stage have not come to sum its gradients"
        elif action in ready:
            yield "it is ready, but the policy does not start it"
        for product, stage in needs(action, self.schedule.num_stages):
            if not ready.has(product, stage, action.microbatch):
                yield misses(self.schedule, product, stage, action.microbatch)
        route = self.schedule.route_of[action.microbatch]
        if action.op is Op.F and ready.free_slots(action.stage, route) <= 0:
            yield f"all slots of stage {action.stage} are taken"
