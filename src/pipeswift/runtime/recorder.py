"""What a rank did and when, written down as it happens: two clock reads per span into arrays made beforehand."""

from __future__ import annotations

import dataclasses
from array import array
from time import perf_counter

import numpy as np

from pipeswift.ir import Action
from pipeswift.runtime.peers import Peers
from pipeswift.trace import COLUMNS, COMPUTE, Counter, Trace

clock = perf_counter  # monotonic, and on Linux the same for all processes of a machine


class Recorder:
    """Room for `spans` compute spans of one rank in one step; spans of other lanes are added when it is over."""

    def __init__(self, rank: int, num_ranks: int, spans: int):
        self._rank, self._num_ranks = rank, num_ranks
        self._times = array("d", bytes(16 * spans))  # start, end, start, end, ...
        self._actions: list[Action] = []
        self.counters: tuple[Counter, ...] = ()
        self._lanes: list[int] = []  # of spans after the compute spans

    def span(self, action: Action, start: float, end: float) -> None:
        at = 2 * len(self._actions)
        self._times[at] = start
        self._times[at + 1] = end
        self._actions.append(action)

    def add(self, lane: int, action: Action, start: float, end: float) -> None:
        """A span of another lane, after the last compute span."""
        del self._times[2 * len(self._actions) :]
        self._times.extend((start, end))
        self._actions.append(action)
        self._lanes.append(lane)

    def trace(self, name: str) -> Trace:
        """The spans so far, on this rank's clock."""
        count = len(self._actions)
        times = np.array(self._times[: 2 * count]).reshape(-1, 2)
        stage, op, microbatch = np.array(self._actions, dtype=np.int32).reshape(-1, 3).T
        lane = np.array([COMPUTE] * (count - len(self._lanes)) + self._lanes, dtype=np.int32)
        spans = Trace(
            num_ranks=self._num_ranks,
            rank=np.full(count, self._rank, dtype=np.int32),
            stage=stage,
            op=op,
            microbatch=microbatch,
            start=times[:, 0],
            end=times[:, 1],
            lane=lane,
            counters=self.counters,
            name=name,
        )
        return spans.only(np.argsort(spans.start, kind="stable")) if self._lanes else spans


def gather(peers: Peers, mine: Trace) -> Trace:
    """One trace of all ranks, on every rank, its clock starting at the first span. Every rank must call this."""
    everyone = peers.all_gather({key: getattr(mine, key) for key in (*COLUMNS, "counters")})
    columns = {key: np.concatenate([part[key] for part in everyone]) for key in COLUMNS}
    zero = columns["start"].min(initial=np.inf)
    columns["start"], columns["end"] = columns["start"] - zero, columns["end"] - zero
    counters = (dataclasses.replace(c, time=c.time - zero) for part in everyone for c in part["counters"])
    return dataclasses.replace(mine, **columns, counters=tuple(counters))
