"""What ranks agree on that meet in collectives: one order of the passes in which they meet, which the first one leads.

Messages in, messages out: no clock, no I/O. They must arrive, and those of one sender in their order.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pipeswift.ir import Action, Op, Product, Schedule
from pipeswift.policy.ready import Ready, Slots

LEADER = 0


class Go(NamedTuple):
    """From the leader to all others: `action` is the next one in which they meet."""

    action: Action


class Arrived(NamedTuple):
    """To the leader: a product is there."""

    member: int
    product: Product
    stage: int
    microbatch: int


class Ended(NamedTuple):
    """To the leader: an action has ended in which nobody meets, such as a W."""

    member: int
    action: Action


Message = Go | Arrived | Ended


class Agreed(Ready):
    """The actions that one of `members` ranks may start, which all run `schedule` as `rank` does.

    They meet in F, I and B of the stages in `meets`. Of these the next is ready on a member once it has been promised
    and is ready there; as long as none is, those are ready on the leader that are ready on every member. So all run
    them in one order, and each runs the others, such as W, when its own policy likes.

    The leader keeps what each member may do once it has run all that was promised. What is ready on a member stays so
    until it is promised: what has arrived stays, and slots are taken by promises alone. So a report that comes late
    delays a choice, and makes none wrong.

    outbox: messages for others, for the caller to send and clear; a leader's go to all, a follower's to the leader.
    """

    def __init__(self, schedule: Schedule, rank: int, slots: Slots, member: int, members: int, meets: frozenset[int]):
        super().__init__(schedule, rank, slots)
        self._member, self._meets = member, meets
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

    def meets(self, action: Action) -> bool:
        return action.op is not Op.W and action.stage in self._meets

    def ready_on_all(self, action: Action) -> bool:
        """Whether every member can run it after what has been promised. For the leader."""
        return all(action in mirror for mirror in self._mirrors)

    def room_on_all(self, stage: int, route: int) -> bool:
        """Whether every member has a free slot after what has been promised. For the leader."""
        return all(mirror.free_slots(stage, route) > 0 for mirror in self._mirrors)

    def promise(self, action: Action) -> None:
        """The leader's word that `action` comes next of those in which members meet."""
        self._promised.append(action)
        for mirror in self._mirrors:
            mirror.start(action)
            mirror.finish(action)
        self.outbox.append(Go(action))

    def hear(self, message: Message) -> None:
        if isinstance(message, Go):
            self._promised.append(message.action)
        elif isinstance(message, Arrived):
            _, product, stage, microbatch = message
            self._mirrors[message.member].arrive(product, stage, microbatch)
        else:
            self._mirrors[message.member].start(message.action)
            self._mirrors[message.member].finish(message.action)

    # What the rank itself sees and does.

    def arrive(self, product: Product, stage: int, microbatch: int) -> None:
        super().arrive(product, stage, microbatch)
        self._report(Arrived(self._member, product, stage, microbatch))

    def start(self, action: Action) -> None:
        if self.meets(action):
            if self.open:
                self.promise(action)
            due = self._promised.popleft() if self._promised else None
            if action != due:
                raise ValueError(f"{action} started, where {due} was due of the passes in which ranks meet")
        super().start(action)

    def finish(self, action: Action) -> None:
        super().finish(action)
        if not self.meets(action):
            self._report(Ended(self._member, action))

    def __contains__(self, action: Action) -> bool:
        if not self.meets(action):
            return super().__contains__(action)
        if self._promised:
            return self._promised[0] == action and super().__contains__(action)
        return self.leads and self.ready_on_all(action)

    def next_in_line(self) -> tuple[Action, ...]:
        """Of the actions in which members meet, the promised one alone, if there is one."""
        line = super().next_in_line()
        if not self._promised:
            return line
        return tuple(action for action in line if not self.meets(action) or action == self._promised[0])

    def _report(self, message: Arrived | Ended) -> None:
        if self.leads:
            self.hear(message)
        else:
            self.outbox.append(message)
