"""What a rank did and when, written down as it happens: two clock reads per span into arrays made beforehand."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from pipeswift.ir import Action
from pipeswift.runtime.peers import Peers
from pipeswift.trace import COLUMNS, COMPUTE, Counter, Trace

clock = perf_counter  # monotonic, and on Linux the same for all processes of a machine


class Recorder:
    """Room for `spans` spans of one rank in one step; more may be added when it is over."""

    def __init__(self, rank: int, num_ranks: int, spans: int):
        self._rank, self._num_ranks = rank, num_ranks
        self._times = array("d", bytes(16 * spans))  # start, end, start, end, ...
        self._actions: list[Action] = []
        self.counters: tuple[Counter, ...] = ()
        self.info: Mapping[str, object] = {}
        self._lanes = array("i", bytes(4 * spans))

    def span(self, action: Action, start: float, end: float, lane: int = COMPUTE) -> None:
        number = len(self._actions)
        self._times[2 * number] = start
        self._times[2 * number + 1] = end
        self._lanes[number] = lane
        self._actions.append(action)

    def add(self, lane: int, action: Action, start: float, end: float) -> None:
        """A span after the step."""
        number = len(self._actions)
        del self._times[2 * number :]
        del self._lanes[number:]
        self._times.extend((start, end))
        self._lanes.append(lane)
        self._actions.append(action)

    def seconds(self) -> list[float]:
        """How long each span so far took, in the order in which they were recorded."""
        return np.diff(np.array(self._times[: 2 * len(self._actions)]).reshape(-1, 2)).ravel().tolist()

    def trace(self, name: str) -> Trace:
        """The spans so far, on this rank's clock, in the order in which they started."""
        count = len(self._actions)
        times = np.array(self._times[: 2 * count]).reshape(-1, 2)
        order = np.argsort(times[:, 0], kind="stable")
        times = times[order]
        stage, op, microbatch = np.array(self._actions, dtype=np.int32).reshape(-1, 3)[order].T
        return Trace(
            num_ranks=self._num_ranks,
            rank=np.full(count, self._rank, dtype=np.int32),
            stage=stage,
            op=op,
            microbatch=microbatch,
            start=times[:, 0],
            end=times[:, 1],
            lane=np.array(self._lanes[:count], dtype=np.int32)[order],
            counters=self.counters,
            name=name,
            info=self.info,
        )


def gather(peers: Peers, mine: Trace) -> Trace:
    """One trace of all ranks, on every rank, its clock starting at the first span. Every rank must call this."""
    return _joined(mine, [peers.all_gather(_sent(mine))])[0]


def gather_replicas(peers: Peers, mine: Trace) -> tuple[Trace, ...]:
    """The same of every replica, on one clock, on every rank of all, each of which must call this."""
    parts, copies = peers.everyone.all_gather(_sent(mine)), peers.replicas.size
    return _joined(mine, [parts[replica::copies] for replica in range(copies)])


def _sent(mine: Trace) -> dict[str, Any]:
    return {key: getattr(mine, key) for key in (*COLUMNS, "counters")}


def _joined(mine: Trace, replicas: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Trace, ...]:
    """A trace of each replica, from the parts of its ranks."""
    zero = min(part["start"].min(initial=np.inf) for parts in replicas for part in parts)
    joined = []
    for parts in replicas:
        columns = {key: np.concatenate([part[key] for part in parts]) for key in COLUMNS}
        columns["start"], columns["end"] = columns["start"] - zero, columns["end"] - zero
        counters = (dataclasses.replace(c, time=c.time - zero) for part in parts for c in part["counters"])
        joined.append(dataclasses.replace(mine, **columns, counters=tuple(counters)))
    return tuple(joined)
