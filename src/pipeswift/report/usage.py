"""What the time of each rank goes into: passes, all-to-alls beside them or alone, reductions, nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeswift.ir import Op
from pipeswift.trace import ALL_TO_ALL, COMPUTE, Trace, makespan


class Activity(NamedTuple):
    """What one rank is at between each two neighbouring moments; bool, one entry less than `moments`."""

    moments: np.ndarray
    compute: np.ndarray
    exchange: np.ndarray  # all-to-alls of experts
    reduction: np.ndarray  # of gradients, over replicas


class Usage(NamedTuple):
    """Shares of a step, between 0 and 1; the first four make up the whole.

    busy: in passes. exposed: in all-to-alls with no pass beside them. reducing: in nothing but reductions of gradients.
    idle: in nothing at all. hidden: in all-to-alls beside passes; part of busy.
    """

    busy: float
    exposed: float
    reducing: float
    idle: float
    hidden: float


def usage(trace: Trace) -> tuple[Usage, ...]:
    """By rank, of the time from the first start to the last end on any. Raises EmptyTrace where there is no span."""
    whole = makespan(trace)
    return tuple(_usage(activity(spans), whole) for spans in trace.by_rank())


def activity(spans: Trace) -> Activity:
    """Of one rank's spans."""
    moments = np.unique(np.concatenate((spans.start, spans.end)))
    reduces = (spans.lane == ALL_TO_ALL) & (spans.op == Op.W)
    kinds = (spans.lane == COMPUTE, (spans.lane == ALL_TO_ALL) & ~reduces, reduces)
    return Activity(moments, *(_under_way(spans.only(kind), moments[:-1]) for kind in kinds))


def _under_way(spans: Trace, moments: np.ndarray) -> np.ndarray:
    started = np.searchsorted(np.sort(spans.start), moments, side="right")
    return started > np.searchsorted(np.sort(spans.end), moments, side="right")


def _usage(found: Activity, whole: float) -> Usage:
    lengths = np.diff(found.moments)
    share = lambda when: float(lengths[when].sum()) / whole if whole else 0.0  # noqa: E731
    busy, exposed = share(found.compute), share(found.exchange & ~found.compute)
    reducing = share(found.reduction & ~found.exchange & ~found.compute)
    idle = max(1.0 - busy - exposed - reducing, 0.0)
    return Usage(busy, exposed, reducing, idle, share(found.exchange & found.compute))
