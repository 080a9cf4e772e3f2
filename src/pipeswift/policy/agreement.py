"""What ranks agree on that meet in collectives: one order of their passes, which the first of them leads.

Messages in, messages out: no clock, no I/O. They must arrive, and those of one sender in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from pipeswift.ir import Action, Product, Schedule
from pipeswift.policy.ready import Ready, Slots

LEADER = 0


class Go(NamedTuple):
    """From the leader to all others: `action` comes next."""

    action: Action


class Arrived(NamedTuple):
    """To the leader: a product is there."""

    member: int
    product: Product
    stage: int
    microbatch: int


Message = Go | Arrived


class Agreed(Ready):
    """The actions that one of `members` ranks may start, which all run `schedule` as `rank` does.

    Once an action has been promised, it is the only one, when it is ready there. As long as none is, those are ready on
    the leader that are ready on every member. So all run all passes in one order, W too: one in which nobody meets
    would still keep the others waiting in the next.

    The leader keeps what each member may do once it has run all that was promised. What is ready on a member stays so
    until it is promised: what has arrived stays, and slots are taken by promises alone. So a report that comes late
    delays a choice, and makes none wrong.

    outbox: messages for others, for the caller to send and clear; the leader's go to all, a follower's to the leader.
    """

    def __init__(self, schedule: Schedule, rank: int, slots: Slots, member: int, members: int):
        super().__init__(schedule, rank, slots)
        self._member = member
        self._promised: deque[Action] = deque()  # and not started
        self._mirrors = [Ready(schedule, rank, slots) for _ in range(members)] if member == LEADER else []
        self.outbox: list[Message] = []

    @property
    def leads(self) -> bool:
        return self._member == LEADER

    @property
    def open(self) -> bool:
        """Whether this rank leads, and has promised nothing that it has not started."""
        return self.leads and not self._promised

    @property
    def promised(self) -> Action | None:
        """What comes next, if that is known."""
        return next(iter(self._promised.copy()), None)  # a copy, since a watchdog's thread asks, too

    def ready_on_all(self, action: Action) -> bool:
        """Whether every member can run it after what has been promised. For the leader."""
        return all(action in mirror for mirror in self._mirrors)

    def may_come(self) -> list[Action]:
        """What can be next after what has been promised, now or once a message is there. For the leader."""
        mirror = self._mirrors[LEADER]
        return [action for action in mirror.next_in_line() if mirror.waits_for_messages(action)]

    def unsure_of(self, product: Product, stage: int, microbatch: int) -> int | None:
        """A member that the leader, which this rank is, has not heard to have that product; None if all have it."""
        return next((i for i, mirror in enumerate(self._mirrors) if not mirror.has(product, stage, microbatch)), None)

    def promise(self, action: Action) -> None:
        """The leader's word that `action` comes next."""
        self._promised.append(action)
        for mirror in self._mirrors:
            mirror.start(action)
            mirror.finish(action)
        self.outbox.append(Go(action))

    def hear(self, message: Message) -> None:
        if isinstance(message, Go):
            self._promised.append(message.action)
        else:
            member, product, stage, microbatch = message
            self._mirrors[member].arrive(product, stage, microbatch)

    # What the rank itself sees and does.

    def arrive(self, product: Product, stage: int, microbatch: int) -> None:
        super().arrive(product, stage, microbatch)
        arrived = Arrived(self._member, product, stage, microbatch)
        if self.leads:
            self.hear(arrived)
        else:
            self.outbox.append(arrived)

    def start(self, action: Action) -> None:
        if self.open:
            self.promise(action)
        due = self._promised.popleft() if self._promised else None
        if action != due:
            raise ValueError(f"{action} started, where {due} was to come next")
        super().start(action)

    def __contains__(self, action: Action) -> bool:
        if self._promised:
            return action == self._promised[0] and super().__contains__(action)
        return self.leads and self.ready_on_all(action)

    def first(self, order: Sequence[Action]) -> Action | None:
        """What was promised, if anything was."""
        return self._promised[0] if self._promised else super().first(order)

    def next_in_line(self) -> Collection[Action]:
        """What was promised, if anything was."""
        return (self._promised[0],) if self._promised else super().next_in_line()
