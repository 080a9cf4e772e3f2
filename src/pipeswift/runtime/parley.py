"""One member's part in a step in which its expert group agrees: what it hears, tells and, as the leader, promises."""

from __future__ import annotations

import numpy as np

from pipeswift.ir import Action
from pipeswift.policy import Agreed, Policy, View
from pipeswift.runtime.hotline import Hotline
from pipeswift.trace import Counter

AGREEMENTS = "agreement messages"


class Parley:
    """ready: of this step. It must be told of all that happens here; what it has for others goes out from here."""

    def __init__(self, ready: Agreed, policy: Policy, hotline: Hotline):
        self._ready, self._policy, self._hotline = ready, policy, hotline
        hotline.begin_step()

    def turn(self) -> None:
        """Takes in what others have said, and tells them what has happened here; never waits."""
        for message in self._hotline.heard():
            self._ready.hear(message)
        self._tell()

    def begin(self, action: Action, view: View) -> None:
        """The rank has started an action, and computes next: what the leader says now travels meanwhile."""
        if self._ready.open and (following := self._policy.ahead(self._ready, view, action)):
            self._ready.promise(following)
        self._tell()

    def counter(self, rank: int, now: float) -> Counter:
        """How many messages this rank has sent in this step; those of one moment are one."""
        return Counter(AGREEMENTS, rank, np.array([now]), np.array([self._hotline.sent]))

    def _tell(self) -> None:
        if self._ready.outbox:
            self._hotline.tell(self._ready.outbox)
            self._ready.outbox.clear()
