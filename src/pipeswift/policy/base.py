"""What a policy is: a pure decision, the same under the simulator's clock and on real devices."""

from __future__ import annotations

from enum import IntEnum
from math import inf
from typing import NamedTuple, Protocol

from pipeswift.ir import Action, Overlap
from pipeswift.policy.agreement import Agreed
from pipeswift.policy.monitor import Monitor
from pipeswift.policy.ready import Ready


class View(NamedTuple):
    """What a rank knows besides what is ready."""

    rank: int
    now: float  # seconds on this rank's clock
    started: int  # entries (actions or overlaps) that it has started in this step
    idle_since: float = 0.0  # when its last entry ended, or the step began
    monitor: Monitor | None = None  # None for a policy that does not watch


class Rule(IntEnum):
    """Why a policy decided so."""

    FOLLOW = 0  # the hint's next entry, or a wait for it
    ADVANCE = 1  # an action ahead of its place in the hint, since those before it cannot run
    HOLD = 2  # a wait, though something is ready, for a message that is known to be on its way
    THROTTLE = 3  # a W instead of an F, since the next stage has enough to do
    FORCE = 4  # the oldest ready action, since the rank has waited for too long
    STARVE = 5  # a wait, since nothing is ready


class Decision(NamedTuple):
    """The entry to start now, or None to wait for an arrival; `until`: when to ask again even without one."""

    entry: Action | Overlap | None
    rule: Rule = Rule.FOLLOW
    until: float = inf


class Policy(Protocol):
    """One object decides for any rank, and keeps nothing from one question to the next."""

    def next(self, ready: Ready, view: View) -> Decision:
        """What to do now. Pure: same facts, same answer."""
        ...

    def ahead(self, ready: Agreed, view: View, running: Action) -> Action | None:
        """What the leader of an expert group promises as next when it starts `running`; None to decide later."""
        return None

    def monitor(self, rank: int) -> Monitor | None:
        """A new watch over the rank's passes and neighbours, for `View.monitor`; None for a policy that needs none."""
        return None
