"""Policy replan on real processes: after a step ranks gather what they have seen, and all make one plan of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeswift.cost import Costs, activations
from pipeswift.ir import Schedule
from pipeswift.policy import Plan, Seen
from pipeswift.runtime.auxiliary import Figures
from pipeswift.runtime.peers import Peers, agree
from pipeswift.runtime.recorder import clock
from pipeswift.search import load, replanned
from pipeswift.simulate import measured_costs
from pipeswift.trace import PLANNING, PLANS, Counter, Trace

ROWS = "rows"  # the figure of a layer that says how many rows each of its experts has got


class Replanning:
    """Of one pipeline. All ranks of all its replicas must make one, and make the same calls.

    in_flight: micro-batches that each stage may hold, as in `search.replanned`.
    """

    def __init__(self, peers: Peers, in_flight: int | None):
        self._peers, self._in_flight = peers, in_flight
        self._plans: dict[str, Plan] = {}  # by the fingerprint of the schedule that they are for
        self._made, self._seconds = 0, 0.0
        load()

    def learn(self, schedule: Schedule, trace: Trace, figures: Mapping[str, Figures]) -> Schedule:
        """The order of the next step, now that one has run, of which this rank has this trace and these figures.

        Raises Disagreement, on every rank, where some make other plans of the same facts.
        """
        seen = self._seen(schedule, trace, figures)
        began = clock()
        last = self._plans.get(schedule.fingerprint) or Plan(schedule)
        plan = self._plans[schedule.fingerprint] = last.after(seen, lambda seconds: self._find(schedule, seconds))
        if plan.made > last.made:
            self._made, self._seconds = self._made + 1, self._seconds + clock() - began
            agree(self._peers, {"plan for the next step": plan.order.fingerprint[:12]})
        return plan.order

    def counters(self) -> tuple[Counter, ...]:
        """How many plans this rank has made so far, and how long it took."""
        now = np.array([clock()])
        values = {PLANS: self._made, PLANNING: self._seconds}
        return tuple(Counter(name, self._peers.rank, now, np.array([value])) for name, value in values.items())

    def _seen(self, schedule: Schedule, trace: Trace, figures: Mapping[str, Figures]) -> Seen:
        """A pass in which ranks meet lasts until the slowest has done it: of their mean seconds the largest counts."""
        loads = {layer: seen.sums[ROWS].numpy() for layer, seen in figures.items() if ROWS in seen.sums}
        everyone = self._peers.everyone.all_gather((mean_seconds(schedule, trace), loads))
        rows: dict[str, np.ndarray] = {}
        for _, theirs in everyone:
            for layer, counts in theirs.items():
                rows[layer] = rows.get(layer, 0) + counts
        return Seen(np.fmax.reduce([seconds for seconds, _ in everyone]), rows)

    def _find(self, schedule: Schedule, seconds: np.ndarray) -> Schedule:
        memory, nothing = activations(schedule.num_stages), np.zeros(schedule.num_stages - 1)
        return replanned(schedule, Costs(seconds[..., None], memory, nothing), self._in_flight)


def mean_seconds(schedule: Schedule, trace: Trace) -> np.ndarray:
    """Of each (op, stage) of this rank; NaN for those of others."""
    seconds = measured_costs(schedule, trace).seconds
    count = (~np.isnan(seconds)).sum(axis=2)
    return np.divide(np.nansum(seconds, axis=2), count, out=np.full(count.shape, np.nan), where=count > 0)
