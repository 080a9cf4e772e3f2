"""V-Half: half of 1F1B's memory, by list scheduling over a V of two chunks per rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from math import ceil
from typing import NamedTuple

from pipeswift.ir import Action, F, I, Op, Schedule, W, vee
from pipeswift.schedules.registry import Idle, Peak, Times, schedule

EQUAL = Times(F=1, I=1, W=1)


@schedule(
    "v-half",
    paper="Qi et al. 2024, Pipeline Parallelism with Controllable Memory, V-Half (the order is our own)",
    bubble=Idle(
        "(3p-7)F/2 if F = I = W (p odd: 3p-4)",
        lambda p, m, v, t: (3 * p - (4 if p % 2 else 7)) * t.F / 2,
        by="span",
        holds=lambda p, m, t: p > 2 and m >= 2 * p and t.equal,
    ),
    memory=Peak("min(m, (p+2)//2)", lambda p, m, v, r: min(m, (p + 2) // 2)),
    chunks=2,
)
def v_half(p: int, m: int, times: Times = EQUAL) -> Schedule:
    """Rank r holds stages r and 2p-1-r, and runs what is ready: the most overdue F or I first, else a W.

    Three ranks, four micro-batches, two of them alive; small letters are the second chunk:

    rank 0  F0 F1 F2 .. .. f0 i0 w0 .. .. f1 i1 I0 w1 W0 F3 f2 i2 I1 w2 W1 f3 i3 I2 w3 W2 .. I3 W3
    rank 1  .. F0 F1 F2 f0 .. .. i0 w0 f1 I0 W0 i1 w1 f2 .. F3 I1 i2 W1 f3 w2 I2 i3 W2 w3 I3 W3 ..
    rank 2  .. .. F0 f0 F1 f1 .. .. i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 i3 I3 w3 W3 ..

    times: seconds of F, I and W; the order is made for their ratios, and any other costs may run it.
    """
    orders = _ListScheduler(p, m, times).run()
    return Schedule.one_route(orders.__getitem__, ranks=p, microbatches=m, chunks=2, placement=vee)


class _Plan(NamedTuple):
    """The steady state aimed at: one micro-batch per period through every stage. Times in ticks.

    due_f, due_i: for each stage, when F and I of micro-batch 0 are due; micro-batch i follows i periods later.
    room: for each stage, the most micro-batches alive there.
    """

    period: int
    due_f: list[int]
    due_i: list[int]
    room: list[int]


def _plan(p: int, limit: int) -> _Plan:
    """One pace from stage to stage, up the V and down again, and three passes of rest at its end.

    A pass of F = I = W takes 2p+1 ticks. The pace is about the one at which `limit` chunks of a rank are between F and
    W; its 2 and the 3 were found by trial, and give the closed form above for every p from 3 to 40.
    """
    period, pace = 6 * (2 * p + 1), 3 * limit - 2
    due_f = [pace * stage for stage in range(2 * p)]
    due_i = [pace * (4 * p - 2 - stage) + 3 * (2 * p + 1) for stage in range(2 * p)]
    # The first p stages leave a place for the last p on the same rank: what is under way can always come home.
    room = [min(limit - 1, ceil((due_i[stage] - due_f[stage]) / period)) for stage in range(p)]
    return _Plan(period, due_f, due_i, room + [limit] * p)


class _ListScheduler:
    """A clock, and what every rank has started by it."""

    def __init__(self, p: int, m: int, times: Times):
        self.ranks, self.microbatches, self.times = p, m, times
        self.limit = 2 * ((p + 2) // 2)  # chunks alive on a rank
        self.plan = _plan(p, self.limit)
        self.last = 2 * p - 1
        self.f_ends: list[list[float]] = [[] for _ in range(2 * p)]  # by stage, then micro-batch
        self.i_ends: list[list[float]] = [[] for _ in range(2 * p)]
        self.alive = [0] * (2 * p)
        self.weights: list[deque[Action]] = [deque() for _ in range(p)]
        self.orders: list[list[Action]] = [[] for _ in range(p)]

    def run(self) -> list[list[Action]]:
        """The order of each rank."""
        free = [0.0] * self.ranks
        moments = [(0.0, rank) for rank in range(self.ranks)]  # a heap, of when to look at which rank
        while moments:
            now, rank = heappop(moments)
            if free[rank] > now or (action := self._choose(rank, now)) is None:
                continue
            free[rank] = self._start(rank, action, now)
            for woken in range(max(rank - 1, 0), min(rank + 2, self.ranks)):
                heappush(moments, (free[rank], woken))
        return self.orders

    def _choose(self, rank: int, now: float) -> Action | None:
        _, action = min(self._ready(rank, now), default=(0, None))
        return action or (self.weights[rank].popleft() if self.weights[rank] else None)

    def _ready(self, rank: int, now: float) -> Iterator[tuple[int, Action]]:
        """(tick at which it is due, F or I that could start now)."""
        period = self.plan.period
        full = self.alive[rank] + self.alive[self.last - rank] == self.limit
        for stage in (rank, self.last - rank):
            i = len(self.i_ends[stage])
            if _there(self.f_ends[stage], i, now) and (stage == self.last or _there(self.i_ends[stage + 1], i, now)):
                yield i * period + self.plan.due_i[stage], I(stage, i)
            i = len(self.f_ends[stage])
            if full or self.alive[stage] == self.plan.room[stage] or i == self.microbatches:
                continue
            if stage == 0 or _there(self.f_ends[stage - 1], i, now):
                yield i * period + self.plan.due_f[stage], F(stage, i)

    def _start(self, rank: int, action: Action, now: float) -> float:
        """When it ends."""
        stage, op, i = action
        end = now + self.times[op]
        self.orders[rank].append(action)
        if op is Op.F:
            self.f_ends[stage].append(end)
            self.alive[stage] += 1
        elif op is Op.I:
            self.i_ends[stage].append(end)
            self.weights[rank].append(W(stage, i))
        else:
            self.alive[stage] -= 1
        return end


def _there(ends: list[float], microbatch: int, now: float) -> bool:
    return microbatch < len(ends) and ends[microbatch] <= now
