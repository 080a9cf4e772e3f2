"""Hand-made timelines."""

import re

import numpy as np

from pipeswift.ir import Op
from pipeswift.trace import COMPUTE, Trace


def timeline(*spans, name="", counters=(), lane=COMPUTE):
    """Spans are (rank, "2F5", start, end)."""
    rank, text, start, end = zip(*spans, strict=True)
    stage, op, microbatch = zip(*(re.fullmatch(r"(\d+)([FIWB])(\d+)", one).groups() for one in text), strict=True)
    whole = lambda values: np.array([int(value) for value in values], dtype=np.int32)  # noqa: E731
    return Trace(
        num_ranks=max(rank) + 1,
        rank=whole(rank),
        stage=whole(stage),
        op=whole([Op[letter] for letter in op]),
        microbatch=whole(microbatch),
        start=np.array(start, dtype=float),
        end=np.array(end, dtype=float),
        lane=np.full(len(spans), lane, dtype=np.int32),
        counters=tuple(counters),
        name=name,
    )


#: A forward and a backward woven into each other on rank 0, and one after the other on rank 1.
WOVEN = timeline((0, "0F1", 0, 3), (0, "0B0", 0, 3), (1, "1F1", 0, 1), (1, "1B0", 1, 3), name="woven")

#: Two ranks, one micro-batch: B takes two of the time units that start at 10 and last 0.5.
SHORT = timeline((0, "0F0", 10, 10.5), (0, "0B0", 12, 13), (1, "1F0", 10.5, 11), (1, "1B0", 11, 12), name="short")
