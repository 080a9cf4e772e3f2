"""The static policy: do what the schedule says, in its order, as soon as it is ready."""

from __future__ import annotations

from pipeswift.ir import Action, Overlap, Schedule
from pipeswift.policy.base import Decision, Policy, View
from pipeswift.policy.ready import Ready


class Follow(Policy):
    """Starts the next entry of each rank's order; waits while that entry is not ready, whatever else is."""

    def __init__(self, schedule: Schedule):
        self._orders: tuple[tuple[Action | Overlap, ...], ...] = tuple(tuple(order) for order in schedule.orders)

    def next(self, ready: Ready, view: View) -> Decision:
        order = self._orders[view.rank]
        if view.started == len(order):
            return WAIT
        entry = order[view.started]
        able = entry in ready if isinstance(entry, Action) else entry.first in ready and entry.second in ready
        return Decision(entry) if able else WAIT


WAIT = Decision(None)
