"""What the works of an MoE block take on one rank: lines through latency and bandwidth, or start-up and throughput."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np

from pipeswift.ir import Op
from pipeswift.program.chunks import LOCAL
from pipeswift.program.steps import Lane, Part, Work


class Line(NamedTuple):
    """Seconds that grow with an amount: fixed + amount * each."""

    fixed: float  # seconds whatever the amount: an all-to-all's latency, the start of a kernel
    each: float  # seconds per unit: per byte, per token, or for the whole

    def __call__(self, amount: float) -> float:
        return self.fixed + amount * self.each

    @classmethod
    def fit(cls, measured: Mapping[int, float] | Mapping[float, float]) -> Line:
        """The line closest to measured seconds by amount: least squares of relative errors, neither part below 0.

        measured: two amounts or more, with seconds above 0.
        """
        amount, seconds = np.array(sorted(measured.items()), dtype=np.float64).T
        columns = np.stack([1 / seconds, amount / seconds], axis=1)
        fixed, each = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0].tolist()
        if fixed < 0 or each < 0:  # then the best line is one of the two that have only the other part
            lines = [cls(_alone(columns[:, 0]), 0.0), cls(0.0, _alone(columns[:, 1]))]
            return min(lines, key=lambda line: float(np.square(columns @ line - 1).sum()))
        return cls(fixed, each)


def _alone(column: np.ndarray) -> float:
    return float(column.sum() / np.square(column).sum())


class Link(NamedTuple):
    """What an all-to-all of a group of ranks takes."""

    latency: float  # seconds of one that carries next to nothing
    bandwidth: float  # bytes per second that each rank sends, all ranks at once

    @property
    def line(self) -> Line:
        return Line(self.latency, 1 / self.bandwidth)


#: Orders of magnitude to plan with where nothing has been measured: nominal line rates per accelerator and direction
#: times .8, an assumed share. NVLink 4, 450 GB/s; InfiniBand NDR, 400 Gbit/s; Ethernet, 25 Gbit/s. The latencies of one
#: all-to-all, launch included, are assumed.
LINKS = {
    "nvlink": Link(latency=15e-6, bandwidth=360e9),
    "infiniband": Link(latency=40e-6, bandwidth=40e9),
    "ethernet": Link(latency=200e-6, bandwidth=2.5e9),
}


def link_of(hosts: Sequence[Hashable], inside: Link, between: Link) -> Link:
    """The link of a group whose rank i is on `hosts[i]`; the bytes that leave a rank go to all others in equal parts.

    Ranks of one host talk over `inside`, others over `between`, both at the same time; the slowest rank counts.
    """
    near = [(hosts.count(host) - 1) / (len(hosts) - 1) for host in hosts] if len(hosts) > 1 else [1.0]
    used = [link for link, share in ((inside, max(near)), (between, 1 - min(near))) if share > 0]
    slowest = max(max(share / inside.bandwidth, (1 - share) / between.bandwidth) for share in near)
    return Link(max(link.latency for link in used), 1 / slowest)


@dataclass(frozen=True)
class BlockCosts:
    """Seconds of each work of an MoE block on one rank, for one micro-batch; a `Seconds` for `simulate`.

    exchange: an all-to-all, by the bytes that leave the rank. sent: the bytes of one dispatch, or combine.
    experts: by op F, I and W, from the start of a kernel to all tokens (amount 1).
    local: the share of the tokens that is computed as chunk LOCAL; 0 for programs without one.
    counts: bytes of the exchange of counts. others: seconds of other parts, by (part, op); what is missing takes none.
    """

    exchange: Line
    sent: float
    experts: Mapping[Op, Line]
    local: float = 0.0
    counts: float = 0.0
    others: Mapping[tuple[Part, Op], float] = field(default_factory=dict)

    @classmethod
    def mean(cls, costs: Sequence[BlockCosts]) -> BlockCosts:
        """Of several ranks, or of blocks that are cut alike."""
        return cls(
            _mean_line([each.exchange for each in costs]),
            fmean(each.sent for each in costs),
            {op: _mean_line([each.experts[op] for each in costs]) for op in costs[0].experts},
            fmean(each.local for each in costs),
            fmean(each.counts for each in costs),
            {part: fmean(each.others.get(part, 0.0) for each in costs) for part in costs[0].others},
        )

    def __call__(self, work: Work) -> float:
        if work.lane is Lane.ALL_TO_ALL:
            return self.exchange(self.counts if work.part is Part.COUNTS else self.sent / work.chunks)
        if work.part is Part.EXPERTS:
            return self.experts[work.op](self._share(work))
        return self.others.get((work.part, work.op), 0.0)

    def _share(self, work: Work) -> float:
        """Which part of the rank's tokens `work` computes."""
        if work.op is Op.W:
            return 1 / work.chunks
        return self.local if work.chunk == LOCAL else (1 - self.local) / work.chunks


def _mean_line(lines: Sequence[Line]) -> Line:
    return Line(fmean(line.fixed for line in lines), fmean(line.each for line in lines))
