"""Several pipelines at once, whose ranks meet in the all-to-alls of experts that they share out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from pipeswift.cost import Costs
from pipeswift.ir import Action, Op, Overlap, Schedule
from pipeswift.policy import Agreed, Follow, Policy, Ready, Slots, slots_of
from pipeswift.program import Program, Timeline, Work, together
from pipeswift.simulate.events import Clock, play
from pipeswift.trace import Trace

Seconds = Callable[[int, Work], float]  # (member, a work of it) -> seconds


def run_joint(
    schedule: Schedule,
    costs: Sequence[Costs],
    programs: Mapping[tuple[int, Op], Program],
    seconds: Seconds,
    policy: Policy | None = None,
    slots: Slots | None = None,
    latency: float = 0.0,
) -> list[Trace]:
    """What each of `len(costs)` members of the expert groups does in one step: pipelines that run `schedule` alike.

    costs: of each member, for its links and for passes in which it meets no other.
    programs: of the other passes, by (stage, op), for any micro-batch and without messages between stages; `seconds`
        says what their works take.
    policy: as in `run`. With one, the members of a stage agree by messages that take `latency` seconds; without one
        each follows the schedule.
    The traces have a span for each work. Raises as `run` does.
    """
    slots = slots_of(schedule) if slots is None else slots
    crowd = _Crowd(programs, seconds, latency)
    shared = {stage for stage, _ in programs}
    for number, mine in enumerate(costs):
        ready = [
            Agreed(schedule, rank, slots, number, len(costs))
            if policy is not None and any(stage in shared for _, stage in schedule.stages_on(rank))
            else Ready(schedule, rank, slots)
            for rank in range(schedule.num_ranks)
        ]
        crowd.members.append(_Member(schedule, mine, ready, policy or Follow(schedule), crowd))
    play(crowd.members)
    return [member.trace() for member in crowd.members]


class _Crowd:
    """Where members meet."""

    def __init__(self, programs: Mapping[tuple[int, Op], Program], seconds: Seconds, latency: float):
        self._programs, self._seconds, self._latency = programs, seconds, latency
        self.members: list[_Member] = []
        self._here: dict[Action, dict[_Member, float]] = defaultdict(dict)  # since when each member waits there

    def meets(self, action: Action) -> bool:
        return (action.stage, action.op) in self._programs

    def enter(self, member: _Member, action: Action, now: float) -> None:
        """A member has come to `action`; the last one lets it begin for all."""
        here = self._here[action]
        here[member] = now
        if len(here) == len(self.members):
            del self._here[action]
            starts = [here[each] for each in self.members]
            for each, timeline in zip(self.members, self._timelines(action, starts), strict=True):
                each.spend(action, timeline)

    def deliver(self, member: _Member, rank: int, now: float) -> None:
        """Sends what a rank has for others."""
        ready = member.ready[rank]
        if not isinstance(ready, Agreed) or not ready.outbox:
            return
        leader, *others = self.members
        for message in ready.outbox:
            for other in others if member is leader else [leader]:
                other.push(now + self._latency, rank, message)
        ready.outbox.clear()

    def _timelines(self, action: Action, starts: Sequence[float]) -> list[Timeline]:
        def of(number: int) -> Callable[[Work], float]:
            return lambda work: self._seconds(number, work._replace(action=action))

        return together(self._programs[action.stage, action.op], [of(n) for n in range(len(starts))], starts)


class _Member(Clock):
    """One pipeline of them."""

    def __init__(self, schedule: Schedule, costs: Costs, ready: Sequence[Ready], policy: Policy, crowd: _Crowd):
        super().__init__(schedule, costs, ready, policy)
        self._crowd = crowd

    def ask(self, rank: int, now: float) -> None:
        self._crowd.deliver(self, rank, now)
        super().ask(rank, now)
        self._crowd.deliver(self, rank, now)

    def begin(self, rank: int, entry: Action | Overlap, now: float) -> None:
        if isinstance(entry, Action) and self._crowd.meets(entry):
            self.enter(rank, entry)
            self._crowd.enter(self, entry, now)
        else:
            super().begin(rank, entry, now)

    def spend(self, action: Action, timeline: Timeline) -> None:
        """What the works of a pass take, now that all members have come to it."""
        rank = self.schedule.routes[self.schedule.route_of[action.microbatch]][action.stage]
        for work, start, end in timeline.spans:
            self.record(rank, action, start, end, work.lane)
        self.push(max(end for _, _, end in timeline.spans), rank, action)
