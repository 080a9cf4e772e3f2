"""Hand-made timelines."""

import re
from dataclasses import replace

import numpy as np

from pipeswift.ir import Op
from pipeswift.trace import ALL_TO_ALL, COLUMNS, COMPUTE, Trace


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


def beside(one, other):
    """The spans of both."""
    columns = {key: np.concatenate([getattr(one, key), getattr(other, key)]) for key in COLUMNS}
    return replace(one, **columns)


#: A forward and a backward woven into each other on rank 0, and one after the other on rank 1.
WOVEN = timeline((0, "0F1", 0, 3), (0, "0B0", 0, 3), (1, "1F1", 0, 1), (1, "1B0", 1, 3), name="woven")

#: Two ranks, one micro-batch: B takes two of the time units that start at 10 and last 0.5.
SHORT = timeline((0, "0F0", 10, 10.5), (0, "0B0", 12, 13), (1, "1F0", 10.5, 11), (1, "1B0", 11, 12), name="short")

# rank 0  compute     F0 F0 .. F0 .. B0 B0 B0 .. .. ..
#         all-to-all  .. f0 f0 .. .. .. b0 .. w0 .. ..   of which w0 is a reduction
# rank 1  compute     .. .. .. .. .. B0 B0 B0 B0 B0 B0
#: Two ranks with all-to-alls beside and between passes, and a reduction at the end.
LANES = beside(
    timeline((0, "0F0", 0, 2), (0, "0F0", 3, 4), (0, "0B0", 5, 8), (1, "1B0", 5, 11), name="lanes"),
    timeline((0, "0F0", 1, 3), (0, "0B0", 6, 7), (0, "0W0", 8, 9), lane=ALL_TO_ALL),
)
