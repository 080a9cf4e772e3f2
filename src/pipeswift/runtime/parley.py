"""One member's part in a step in which its expert group agrees: what it hears, tells and, as the leader, promises."""

from __future__ import annotations

import numpy as np

from pipeswift.ir import Action
from pipeswift.policy import Agreed, Policy, View
from pipeswift.policy.agreement import Arrived
from pipeswift.runtime.channel import Arrival, Inbox
from pipeswift.runtime.hotline import Hotline
from pipeswift.trace import Counter

AGREEMENTS = "agreement messages"


class Parley:
    """ready: of this step, for member number `member`. inbox: where its products arrive; from now on a follower tells
    the leader of each, from the thread that receives it, since the leader may decide before this rank's pass is over.
    """

    def __init__(self, ready: Agreed, member: int, policy: Policy, hotline: Hotline, inbox: Inbox):
        self._ready, self._member, self._policy, self._hotline, self._inbox = ready, member, policy, hotline, inbox
        hotline.begin_step()
        if not ready.leads:
            inbox.tap = self._report

    def listen(self) -> None:
        """Takes in what others have said; never waits."""
        for message in self._hotline.heard():
            self._ready.hear(message)

    def begin(self, action: Action, view: View) -> None:
        """The rank has started an action, and computes next: what the leader says now travels meanwhile."""
        if not self._ready.leads:
            return
        if self._ready.open and (following := self._policy.ahead(self._ready, view, action)):
            self._ready.promise(following)
        if self._ready.outbox:
            self._hotline.tell(self._ready.outbox)
            self._ready.outbox.clear()

    def end(self, rank: int, now: float) -> Counter:
        """The step is over: how many messages this rank has sent in it; those of one moment are one."""
        self._inbox.tap = None
        return Counter(AGREEMENTS, rank, np.array([now]), np.array([self._hotline.sent]))

    def _report(self, arrival: Arrival) -> None:
        self._hotline.tell([Arrived(self._member, *arrival)])
