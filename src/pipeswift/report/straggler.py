"""A rank that is slow step after step, which no order of micro-batches can hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeswift.trace import Trace, busy_per_rank

NOTABLE = 1.2  # times the median of the other ranks
PERSISTENT = 0.8  # share of the steps in which it is


class Straggler(NamedTuple):
    """factor: its busy time over the median of the other ranks', as the median over steps. replica: None of one."""

    rank: int
    factor: float
    replica: int | None = None

    def __str__(self) -> str:
        whose = "" if self.replica is None else f" of replica {self.replica}"
        return (
            f"Rank {self.rank}{whose} is a straggler: its passes take {self.factor:.2f} times as long as those of the "
            "other ranks, step after step. No order of micro-batches hides that. Fewer layers on that rank would (cut "
            "by measured times), or a look at what else runs on its device."
        )


def straggler(steps: Sequence[Sequence[Trace]]) -> Straggler | None:
    """The rank that is persistently slowest, by busy time per step; None if none stands out, or of one rank.

    steps: for each, the traces of all replicas.
    """
    if not steps or sum(trace.num_ranks for trace in steps[0]) == 1:
        return None
    busy = np.array([np.concatenate([busy_per_rank(trace) for trace in replicas]) for replicas in steps])
    others = np.stack([np.median(np.delete(busy, rank, axis=1), axis=1) for rank in range(busy.shape[1])], axis=1)
    ratios = busy / np.maximum(others, 1e-12)
    rank = int(np.median(ratios, axis=0).argmax())
    if np.mean(ratios[:, rank] > NOTABLE) < PERSISTENT:
        return None
    replica, rank_there = divmod(rank, steps[0][0].num_ranks)
    return Straggler(rank_there, float(np.median(ratios[:, rank])), replica if len(steps[0]) > 1 else None)
