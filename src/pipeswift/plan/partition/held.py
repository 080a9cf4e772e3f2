"""What stages hold while a schedule runs: micro-batches in flight, which are also the versions of stashed weights."""

from __future__ import annotations

import numpy as np

from pipeswift.ir import Schedule
from pipeswift.policy import slots_of


def in_flight(schedule: Schedule) -> np.ndarray:
    """The most micro-batches that each stage of the schedule has in flight at once, int64, shape (stages,).

    On several routes the largest counts. The chunks of a rank need not have their most at the same time, so their sum
    is what the rank holds at most.
    """
    counts = np.zeros(schedule.num_stages, dtype=np.int64)
    for (stage, _), slots in slots_of(schedule).items():
        counts[stage] = max(counts[stage], slots)
    return counts


def noam(ranks: int) -> np.ndarray:
    """Micro-batches in flight on each replica of a stage, for asynchronous 1F1B, int64, shape (ranks, ranks).

    [first, replicas - 1] for a stage whose ranks begin at `first`: the ranks from there on over its replicas, rounded
    up. For the first stage that is the NOAM of Narayanan et al. 2019, PipeDream, sec. 3.2.
    """
    remaining = ranks - np.arange(ranks)[:, None]
    return -(-remaining // np.arange(1, ranks + 1))
