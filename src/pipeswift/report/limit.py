"""Where a timeline first needs more memory than there is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeswift.ir import Action, Op
from pipeswift.trace import Trace, memory_curve

_ROUNDING = 1e-9  # sums of chunks' shares, such as three thirds, may be off by this much


class Excess(NamedTuple):
    """The first moment over the limit: `action`, which starts at `time` (seconds) on `rank`, needs `level`."""

    rank: int
    time: float
    action: Action
    level: float


def first_excess(trace: Trace, memory: np.ndarray, limit: float) -> Excess | None:
    """The earliest moment at which a rank holds more than `limit`, or None.

    memory: increments of shape (4, stages) as in `Costs.memory`, in the unit of `limit`.
    """
    found = (_on_rank(spans, memory, limit, rank) for rank, spans in enumerate(trace.by_rank()))
    return min((excess for excess in found if excess), key=lambda excess: excess.time, default=None)


def _on_rank(trace: Trace, memory: np.ndarray, limit: float, rank: int) -> Excess | None:
    times, levels = memory_curve(trace, memory, rank)
    over = np.flatnonzero(levels > limit + _ROUNDING * max(1.0, abs(limit)))
    if not len(over):
        return None
    time = times[over[0]]
    spans = trace.on(rank)
    at = np.flatnonzero((spans.start == time) & (memory[spans.op, spans.stage] > 0))[0]
    action = Action(int(spans.stage[at]), Op(int(spans.op[at])), int(spans.microbatch[at]))
    return Excess(rank, float(time), action, float(levels[over[0]]))
