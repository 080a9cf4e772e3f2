"""What a policy is: a pure decision, the same under the simulator's clock and on real devices."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pipeswift.ir import Action, Overlap
from pipeswift.policy.ready import Ready


class View(NamedTuple):
    """What a rank knows besides what is ready."""

    rank: int
    now: float  # seconds on this rank's clock
    started: int  # entries (actions or overlaps) that it has started in this step


class Policy(Protocol):
    def next(self, ready: Ready, view: View) -> Action | Overlap | None:
        """The entry to start now, or None to wait for an arrival. Pure: same facts, same answer."""
        ...
