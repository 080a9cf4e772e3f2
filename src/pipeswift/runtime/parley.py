"""One member's part in a step in which its expert group agrees: what it hears, tells and, as the leader, promises."""

from __future__ import annotations

import numpy as np

from pipeswift.ir import Action
from pipeswift.policy import Agreed, Decision, Policy, View
from pipeswift.policy.agreement import Arrived
from pipeswift.runtime.channel import Arrival, Inbox
from pipeswift.runtime.hotline import Hotline
from pipeswift.trace import Counter

AGREEMENTS = "agreement messages"


class Parley:
    """ready: of this step, for member number `member`. inbox: where its products arrive; from now on a follower tells
    the leader of each, from the thread that receives it, since the leader may decide before this rank's pass is over;
    what `ready` puts into a follower's outbox is the same, and stays there.
    """

    def __init__(self, ready: Agreed, member: int, policy: Policy, hotline: Hotline, inbox: Inbox):
        self._ready, self._member, self._policy, self._hotline, self._inbox = ready, member, policy, hotline, inbox
        hotline.begin_step()
        if not ready.leads:
            inbox.tap = self._report

    @property
    def leads(self) -> bool:
        return self._ready.leads

    def due(self) -> Decision | None:
        """What to do where nothing is left to decide: start what was promised, or wait for it, or for word of it.

        None: it is for the leader, which this rank is, to decide. Takes in what others have said.
        """
        for message in self._hotline.heard():
            self._ready.hear(message)
        promised = self._ready.promised
        if promised is None and self.leads:
            return None
        return Decision(promised if promised is not None and promised in self._ready else None)

    def say(self) -> None:
        """For the leader: tells all others what it has promised and not told."""
        if self._ready.outbox:
            self._hotline.tell(self._ready.outbox)
            self._ready.outbox.clear()

    def promise(self, action: Action, view: View) -> None:
        """For the leader, which has started `action`: says what comes after it, if that is known already."""
        if self._ready.open and (following := self._policy.ahead(self._ready, view, action)):
            self._ready.promise(following)
            self.say()

    def end(self, rank: int, now: float) -> Counter:
        """The step is over: how many messages this rank has sent in it; those of one moment are one."""
        self._inbox.tap = None
        return Counter(AGREEMENTS, rank, np.array([now]), np.array([self._hotline.sent]))

    def _report(self, arrival: Arrival) -> None:
        self._hotline.tell([Arrived(self._member, *arrival)])
