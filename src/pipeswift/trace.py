"""What happened, or would happen, when: spans and counters in arrays, and the metrics read off them.

Simulated and measured timelines are the same type, so comparing the two is a subtraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

COMPUTE, ALL_TO_ALL, POINT_TO_POINT = 0, 1, 2  # lanes
LANES = ("compute", "all-to-all", "point-to-point")
QUEUE_DEPTH = "queue depth"  # the counter of how many passes had what they need and had not started
PLANS, PLANNING = "plans", "seconds of planning"  # counters of orders that were made between steps so far


class EmptyTrace(ValueError):
    """A metric was asked of a trace without a span."""


@dataclass(frozen=True)
class Counter:
    """A number that changes over time on one rank, such as a queue depth; holds its value until the next time."""

    name: str
    rank: int
    time: np.ndarray  # float64 seconds, ascending
    value: np.ndarray


@dataclass(frozen=True)
class Trace:
    """Spans, one entry per span in each array; a rank's spans appear in the order they started.

    On the all-to-all lane, W is the reduction of a bucket of its stage's gradients, `microbatch` the bucket's number.

    rank, stage, op (F, I, W, B = 0, 1, 2, 3), microbatch, lane: int32. start, end: float64 seconds on one clock.
    """

    num_ranks: int
    rank: np.ndarray
    stage: np.ndarray
    op: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray
    lane: np.ndarray
    counters: tuple[Counter, ...] = ()
    name: str = ""
    info: Mapping[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start)

    def only(self, mask: np.ndarray) -> Trace:
        """The spans that `mask` (bool, one per span, or their indices) selects."""
        columns = {key: getattr(self, key)[mask] for key in COLUMNS}
        return Trace(self.num_ranks, **columns, counters=self.counters, name=self.name, info=self.info)

    def on(self, rank: int, lane: int = COMPUTE) -> Trace:
        """The spans of one rank's lane."""
        return self.only((self.rank == rank) & (self.lane == lane))

    def by_rank(self) -> tuple[Trace, ...]:
        """The spans of each rank; one pass over the trace, where `on` makes one per rank."""
        arranged = np.argsort(self.rank, kind="stable")
        ends = np.searchsorted(self.rank[arranged], np.arange(1, self.num_ranks))
        return tuple(self.only(spans) for spans in np.split(arranged, ends))


COLUMNS = ("rank", "stage", "op", "microbatch", "start", "end", "lane")


def whole_passes(trace: Trace) -> Trace:
    """The compute lane with one span per pass, from its first start to its last end: what a pass waits for in between,
    such as all-to-alls, counts as part of it."""
    spans = trace.only(trace.lane == COMPUTE)
    keys = np.stack([spans.rank, spans.stage, spans.op, spans.microbatch], axis=1)
    _, where, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    start, end = np.full(len(where), np.inf), np.full(len(where), -np.inf)
    np.minimum.at(start, which.reshape(-1), spans.start)
    np.maximum.at(end, which.reshape(-1), spans.end)
    found = replace(spans.only(where), start=start, end=end)
    return found.only(np.lexsort((start, found.rank)))


def makespan(trace: Trace) -> float:
    """Seconds from the first start to the last end over all ranks."""
    _require_spans(trace)
    return float(trace.end.max() - trace.start.min())


def spans_per_rank(trace: Trace) -> np.ndarray:
    """For each rank, seconds from its own first start to its last end; 0 for a rank without spans."""
    _require_spans(trace)
    first = np.full(trace.num_ranks, np.inf)
    last = np.full(trace.num_ranks, -np.inf)
    np.minimum.at(first, trace.rank, trace.start)
    np.maximum.at(last, trace.rank, trace.end)
    return np.where(np.isfinite(first), last - first, 0.0)


def longest_span(trace: Trace) -> float:
    """The longest of `spans_per_rank`, seconds."""
    return float(spans_per_rank(trace).max())


def busy_per_rank(trace: Trace) -> np.ndarray:
    """For each rank, seconds spent in passes on its compute lane; the time of overlapped passes counts once."""
    return np.array([_covered(spans.on(rank)) for rank, spans in enumerate(trace.by_rank())])


def bubble_rate(trace: Trace, *, by: Literal["span", "makespan"]) -> float:
    """Share of rank-time spent idle, between 0 and 1: 1 - (mean busy time) / cost.

    by="span": cost is the longest of (last end - that rank's first start) over ranks (Qi et al. 2024, sec. 5).
    by="makespan": cost is last end - first start over all ranks; use it when the optimizer step needs a barrier.
    Raises EmptyTrace when no span was recorded.
    """
    cost = longest_span(trace) if by == "span" else makespan(trace)
    return 1.0 - float(busy_per_rank(trace).mean()) / cost if cost > 0 else 0.0


def memory_curve(trace: Trace, memory: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(times, level after each) on one rank, given increments `memory` of shape (4, stages) as in `Costs.memory`.

    A positive increment counts from the start of its pass, a negative one from its end. Where a pass ends at the
    moment another starts, the end comes first. A pass of several spans counts once.
    """
    spans = passes(trace.on(rank))
    change = memory[spans.op, spans.stage]
    grows = change > 0
    time = np.where(grows, spans.start, spans.end)
    # With passes of no length, program order decides; a rank's spans are stored in that order.
    order = np.lexsort((np.arange(len(spans)), grows, time))
    return time[order], np.cumsum(change[order])


def passes(spans: Trace) -> Trace:
    """One rank's spans, those of one pass as one from its first start to its last end; in the order of starts."""
    sizes = [int(column.max(initial=0)) + 1 for column in (spans.op, spans.stage, spans.microbatch)]
    number = np.ravel_multi_index((spans.op, spans.stage, spans.microbatch), sizes) if len(spans) else spans.op
    _, first, of = np.unique(number, return_index=True, return_inverse=True)
    if len(first) == len(spans):
        return spans
    ends = np.full(len(first), -np.inf)
    np.maximum.at(ends, of, spans.end)
    order = np.argsort(first)
    return replace(spans.only(first[order]), end=ends[order])


def peak_memory(trace: Trace, memory: np.ndarray) -> np.ndarray:
    """The highest level of `memory_curve` on each rank, shape (ranks,), at least 0."""
    levels = (memory_curve(spans, memory, rank)[1] for rank, spans in enumerate(trace.by_rank()))
    return np.array([max(level.max(initial=0.0), 0.0) for level in levels])


def _covered(spans: Trace) -> float:
    """Seconds in which at least one of `spans`, given in the order of their starts, was under way."""
    until = np.maximum.accumulate(np.concatenate(([-np.inf], spans.end[:-1])))[: len(spans)]
    return float(np.maximum(spans.end - np.maximum(spans.start, until), 0.0).sum())


def _require_spans(trace: Trace) -> None:
    if not len(trace):
        raise EmptyTrace("the trace holds no span: record or simulate at least one pass first")
