"""Who decides what the ranks of a pipeline start next: the schedule's order, or a policy that adapts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.policy import Follow, Policy, Slots, Swift, calibrate, check_replan, merge_calibrations, slots_of
from pipeswift.runtime.auxiliary import Figures
from pipeswift.runtime.channel import Inbox
from pipeswift.runtime.groups import Group
from pipeswift.runtime.hotline import Hotline
from pipeswift.runtime.lookout import Lookout
from pipeswift.runtime.news import News
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.recorder import gather
from pipeswift.runtime.replanning import Replanning
from pipeswift.simulate import listeners
from pipeswift.trace import Counter, Trace

POLICIES = ("follow", "swift", "replan")
WARM_UP = 1  # steps that are not looked at; the next one calibrates, or is the first to be planned by


class Helm(NamedTuple):
    """What decides in one step, within which limits.

    lookout: for a policy that watches. order: what it follows, where that is not the schedule's own. hotline: where
    ranks share out experts, and have to agree.
    """

    policy: Policy
    slots: Slots
    lookout: Lookout | None = None
    order: Schedule | None = None
    hotline: Hotline | None = None


class Steering:
    """The choice of a pipeline, one for all its ranks.

    policy: "follow", "swift", "replan", or a function from a schedule to a Policy. swift follows the schedule for the
        first two steps, and takes its thresholds from the second's times; where `in_flight` is less than that order
        holds, it decides from the first step, without such thresholds. replan follows it for as long, and then the
        best order for what passes have lately cost, the same on all ranks, found between steps whenever that has
        changed. A function's policy decides from the first step.
    in_flight: micro-batches that each stage may hold, from F to W or B; by default as many as the schedule's own order.
    """

    def __init__(self, peers: Peers, policy: str | Callable[[Schedule], Policy], in_flight: int | None, inbox: Inbox):
        self._peers, self._policy, self._in_flight, self._inbox = peers, policy, in_flight, inbox
        self._helms: dict[str, Helm] = {}  # that adapt, by the schedule's fingerprint
        self._following: dict[str, Helm] = {}  # its own order
        self._news: News | None = None
        self._hotline: Hotline | None = None
        self._replanning = Replanning(peers, in_flight) if policy == "replan" else None
        self._steps = 0

    @property
    def static(self) -> bool:
        """Whether every step runs the schedule's own order."""
        return self._policy == "follow"

    @property
    def name(self) -> str:
        return self._policy if isinstance(self._policy, str) else "custom"

    def check(self, schedule: Schedule) -> None:
        """Raises PipeSwiftError when there is no such policy, or it cannot decide for `schedule`."""
        _check(self._policy, self._in_flight)
        if self._policy == "swift":
            Swift(schedule)
        if self._policy == "replan":
            check_replan(schedule, self._in_flight)
        if not self.static and not schedule.flush:
            raise PipeSwiftError(
                f"a policy of your own may leave the order of {schedule.name}, which says what version of the weights "
                "each pass uses: use policy follow, or a schedule that flushes, such as 1f1b"
            )
        if callable(self._policy) and schedule.overlaps and self._shared_out.size > 1:
            raise PipeSwiftError(
                f"a policy of your own cannot start the woven pairs of {schedule.name} where ranks share out experts "
                f"(ep = {self._shared_out.size}), which agree on one pass at a time: use policy follow, or a schedule "
                "without them, such as 1f1b"
            )

    def learns_from(self, schedule: Schedule) -> bool:
        """Whether it wants the trace of a step of `schedule`."""
        if schedule.forward_only or self._policy not in ("swift", "replan"):
            return False
        return self._policy == "replan" or schedule.fingerprint not in self._helms

    def helm(self, schedule: Schedule) -> Helm:
        """Who decides in the next step of `schedule`. Every rank must ask, in the same order."""
        if self.static or schedule.forward_only:
            return self._followed(schedule)
        if callable(self._policy):
            return self._watched(schedule, self._policy)
        if self._policy == "swift" and self._below(schedule):
            return self._watched(schedule, lambda hint: Swift(hint, self._slots(hint)))
        return self._helms.get(schedule.fingerprint) or self._followed(schedule)

    def learn(self, schedule: Schedule, trace: Trace, figures: Mapping[str, Figures]) -> None:
        """A step has run, and `trace` and `figures` are this rank's. Every rank must call this."""
        self._steps += 1
        if self._steps > WARM_UP and self._replanning is not None:
            order = self._replanning.learn(schedule, trace, figures)
            self._helms[schedule.fingerprint] = Helm(Follow(order), slots_of(order), order=order)
        elif self._steps > WARM_UP:
            mine = calibrate(gather(self._peers, trace))
            calibration = merge_calibrations(self._shared_out.all_gather(mine))
            slots = self._slots(schedule)
            self._watched(schedule, lambda hint: Swift(hint, slots, calibration=calibration))

    def counters(self) -> tuple[Counter, ...]:
        """What it has done between steps so far."""
        return self._replanning.counters() if self._replanning is not None else ()

    def close(self) -> None:
        if self._news is not None:
            self._news.close()
        if self._hotline is not None:
            self._hotline.close()

    @property
    def _shared_out(self) -> Group:
        """The ranks that share out experts with this one."""
        return self._peers.replicas.experts

    def _below(self, schedule: Schedule) -> bool:
        """Whether the schedule's own order holds more than it may."""
        return self._in_flight is not None and self._in_flight < max(slots_of(schedule).values())

    def _followed(self, schedule: Schedule) -> Helm:
        if schedule.fingerprint not in self._following:
            self._following[schedule.fingerprint] = Helm(Follow(schedule), slots_of(schedule))
        return self._following[schedule.fingerprint]

    def _watched(self, schedule: Schedule, make: Callable[[Schedule], Policy]) -> Helm:
        if schedule.fingerprint not in self._helms:
            policy = make(schedule)
            if not callable(getattr(policy, "next", None)):
                raise PipeSwiftError(
                    f"policy is a function that returned {policy!r} for {schedule.name}: it has to return a Policy, "
                    "such as pipeswift.policy.Swift(schedule)"
                )
            monitor = policy.monitor(self._peers.rank)
            if monitor is not None and self._news is None:
                self._news = News(self._peers.pipeline, listeners(schedule)[self._peers.rank])
            lookout = Lookout(monitor, self._news) if monitor is not None and self._news is not None else None
            if self._hotline is None and self._shared_out.size > 1:
                self._hotline = Hotline(self._shared_out, self._inbox)
            self._helms[schedule.fingerprint] = Helm(policy, self._slots(schedule), lookout, hotline=self._hotline)
        return self._helms[schedule.fingerprint]

    def _slots(self, schedule: Schedule) -> Slots:
        own = slots_of(schedule)
        return own if self._in_flight is None else dict.fromkeys(own, self._in_flight)


def _check(policy: object, in_flight: object) -> None:
    if policy not in POLICIES and not callable(policy):
        raise PipeSwiftError(f"policy = {policy!r} is none of {', '.join(POLICIES)}: use swift, say")
    if in_flight is not None and (not isinstance(in_flight, int) or in_flight < 1):
        raise PipeSwiftError(
            f"in_flight = {in_flight!r} is no whole number from 1: each stage needs room for a micro-batch; use 4, say"
        )
    if in_flight is not None and policy == "follow":
        raise PipeSwiftError(
            f"in_flight = {in_flight} limits a policy that adapts: leave it out, or use policy swift or replan"
        )
