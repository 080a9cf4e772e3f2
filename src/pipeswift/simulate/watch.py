"""How policies that watch learn what they may know in a simulation: what has ended, and late news of neighbours."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from math import isfinite

import numpy as np

from pipeswift.cost import Costs
from pipeswift.ir import Action, Schedule
from pipeswift.policy import Monitor, Rule, Summary
from pipeswift.policy.diary import Diary
from pipeswift.trace import Counter


class Watch:
    """The monitors of all ranks, and the summaries under way to each."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        monitors: Sequence[Monitor | None],
        hearsay: Callable[[Summary, int], float] | None,
    ):
        ranks = range(schedule.num_ranks)
        self._monitors = [monitor or Monitor(rank) for rank, monitor in zip(ranks, monitors, strict=True)]
        self._diaries = [Diary(rank) for rank in ranks]
        self._began: list[dict[Action, float]] = [{} for _ in ranks]
        self._latency = np.broadcast_to(costs.latency, (schedule.num_ranks, schedule.num_ranks))
        self._hearsay = hearsay or self._with_the_links
        self._listeners = listeners(schedule)
        self._coming: list[list[tuple[float, int, Summary]]] = [[] for _ in ranks]
        self._number = count()

    def monitor(self, rank: int, now: float) -> Monitor:
        """The rank's monitor, which has heard all that is there by now."""
        coming, monitor = self._coming[rank], self._monitors[rank]
        while coming and coming[0][0] <= now:
            arrival, _, summary = heapq.heappop(coming)
            monitor.hear(summary, arrival)
        return monitor

    def note(self, rank: int, now: float, rule: Rule, depth: int) -> None:
        self._diaries[rank].note(now, rule, depth)

    def tell(self, rank: int, action: Action, now: float, depth: int) -> None:
        """The rank starts an action, and sends word of it."""
        self._began[rank][action] = now
        summary = self._monitors[rank].summary(action, now, depth)
        for listener in self._listeners[rank]:
            delay = self._hearsay(summary, listener)
            if isfinite(delay):
                heapq.heappush(self._coming[listener], (now + delay, next(self._number), summary))

    def ended(self, rank: int, action: Action, now: float) -> None:
        if (began := self._began[rank].pop(action, None)) is not None:
            self._monitors[rank].ended(action, now - began)

    def counters(self) -> tuple[Counter, ...]:
        return tuple(counter for diary in self._diaries for counter in diary.counters())

    def _with_the_links(self, summary: Summary, listener: int) -> float:
        return float(self._latency[summary.rank, listener])


def listeners(schedule: Schedule) -> list[list[int]]:
    """For each rank, the other ranks that hold a stage before or after one of its own."""
    near: list[set[int]] = [set() for _ in range(schedule.num_ranks)]
    for route in schedule.routes:
        for one, other in pairwise(route):
            if one != other:
                near[one].add(other)
                near[other].add(one)
    return [sorted(ranks) for ranks in near]
