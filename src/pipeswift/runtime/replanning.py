"""Policy replan on real processes: after a step ranks gather what they have seen, and all make one plan of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeswift.cost import Costs, activations
from pipeswift.ir import Op, Schedule
from pipeswift.policy import Plan, Seen
from pipeswift.runtime.auxiliary import Figures
from pipeswift.runtime.peers import Peers, agree
from pipeswift.runtime.recorder import clock
from pipeswift.search import load, replanned
from pipeswift.simulate import fitted_latency, measured_costs
from pipeswift.trace import ALL_TO_ALL, COMPUTE, PLANNING, PLANS, Counter, Trace, longest_span

ROWS = "rows"  # the figure of a layer that says how many rows each of its experts has got


class Account(NamedTuple):
    """What one rank tells after a step. seconds: of its passes, shape (4, stages, micro-batches), NaN for others.

    meets: in which (op, stage) it meets others in all-to-alls. span: seconds from its first start to its last end.
    loads: rows by expert, of its layers that have experts.
    """

    seconds: np.ndarray
    meets: np.ndarray
    span: float
    loads: Mapping[str, np.ndarray]


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
        accounts = self._peers.everyone.all_gather(account_of(schedule, trace, figures))
        began = clock()
        last = self._plans.get(schedule.fingerprint) or Plan(schedule)
        passes = combined(accounts, self._peers.replicas.experts.size)
        span = max(account.span for account in accounts)

        def find(seconds: np.ndarray) -> Schedule:
            latency = fitted_latency(last.order, _costs(schedule, passes), span)
            return replanned(schedule, _costs(schedule, seconds[..., None], latency), self._in_flight, last.order)

        plan = self._plans[schedule.fingerprint] = last.after(Seen(_mean(passes), _sum_of_loads(accounts)), find)
        if plan.made > last.made:
            self._made, self._seconds = self._made + 1, self._seconds + clock() - began
            agree(self._peers, {"plan for the next step": plan.order.fingerprint[:12]})
        return plan.order

    def counters(self) -> tuple[Counter, ...]:
        """How many plans this rank has made so far, and how long it took."""
        now = np.array([clock()])
        values = {PLANS: self._made, PLANNING: self._seconds}
        return tuple(Counter(name, self._peers.rank, now, np.array([value])) for name, value in values.items())


def account_of(schedule: Schedule, trace: Trace, figures: Mapping[str, Figures]) -> Account:
    seconds = measured_costs(schedule, trace).seconds
    meets = np.zeros(seconds.shape[:2], dtype=np.bool_)
    sent = trace.only((trace.lane == ALL_TO_ALL) & (trace.op != Op.W))  # W there is a reduction of gradients
    meets[sent.op, sent.stage] = True
    loads = {layer: seen.sums[ROWS].numpy() for layer, seen in figures.items() if ROWS in seen.sums}
    return Account(seconds, meets, longest_span(trace.only(trace.lane == COMPUTE)), loads)


def combined(accounts: Sequence[Account], experts: int) -> np.ndarray:
    """What each pass takes, in the form of `Account.seconds`, from accounts of which `experts` in a row share experts.

    Where these meet in a pass they end it together, and it lasts what the last to come saw of it, the least. Otherwise
    the slowest rank counts.
    """
    seconds = np.stack([account.seconds for account in accounts])
    meets = np.any([account.meets for account in accounts], axis=0)[..., None]
    groups = seconds.reshape(-1, experts, *seconds.shape[1:])
    return np.fmax.reduce(np.where(meets, np.fmin.reduce(groups, axis=1), np.fmax.reduce(groups, axis=1)))


def _mean(passes: np.ndarray) -> np.ndarray:
    """Over micro-batches; NaN where none ran."""
    count = (~np.isnan(passes)).sum(axis=2)
    return np.divide(np.nansum(passes, axis=2), count, out=np.full(count.shape, np.nan), where=count > 0)


def _sum_of_loads(accounts: Sequence[Account]) -> dict[str, np.ndarray]:
    rows: dict[str, np.ndarray] = {}
    for account in accounts:
        for layer, counts in account.loads.items():
            rows[layer] = rows.get(layer, 0) + counts
    return rows


def _costs(schedule: Schedule, seconds: np.ndarray, latency: float = 0.0) -> Costs:
    return Costs(seconds, activations(schedule.num_stages), np.zeros(schedule.num_stages - 1), latency)
