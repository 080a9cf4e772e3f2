"""The static policy: do what the schedule says, in its order, as soon as it is ready."""

from __future__ import annotations

from pipeswift.ir import Overlap, Schedule
from pipeswift.policy.base import Decision, Policy, View
from pipeswift.policy.ready import Ready


class Follow(Policy):
    """Starts the next entry of each rank's order; waits while that entry is not ready, whatever else is."""

    def __init__(self, schedule: Schedule):
        self._orders = schedule.orders
        self._decisions: dict[int, tuple[Decision, ...]] = {}  # by rank, of those that have asked

    def next(self, ready: Ready, view: View) -> Decision:
        decisions = self._decisions.get(view.rank) or self._decided(view.rank)
        if view.started == len(decisions):
            return WAIT
        decision = decisions[view.started]
        entry = decision.entry
        assert entry is not None
        able = entry.first in ready and entry.second in ready if isinstance(entry, Overlap) else entry in ready
        return decision if able else WAIT

    def _decided(self, rank: int) -> tuple[Decision, ...]:
        self._decisions[rank] = tuple(map(Decision, self._orders[rank]))
        return self._decisions[rank]


WAIT = Decision(None)
