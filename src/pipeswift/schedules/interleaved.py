"""Interleaved 1F1B: several chunks per rank, passed through in rounds."""

from collections.abc import Iterator

from pipeswift.ir import Action, B, F, Schedule
from pipeswift.schedules.registry import Idle, Peak, Rule, schedule

WHOLE_ROUNDS = Rule("--microbatches", "a number of micro-batches that is a multiple of --pp", lambda p, m: m % p == 0)


def _warm(p: int, m: int, v: int, rank: int) -> int:
    """How many forwards (of chunks) a rank runs before it starts to alternate."""
    return m * v if m == p else min(m * v, 2 * (p - rank - 1) + (v - 1) * p)


@schedule(
    "interleaved-1f1b",
    paper="Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, sec. 2.2",
    bubble=Idle("(p-1)(F+B)/v", lambda p, m, v, t: (p - 1) * (t.F + t.B) / v),
    memory=Peak(
        "min(m, (2(p-r-1) + (v-1)p + 1)/v); m if m = p", lambda p, m, v, r: min(m * v, _warm(p, m, v, r) + 1) / v
    ),
    rules=(WHOLE_ROUNDS,),
    chunks=2,
    any_chunks=True,
)
def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B over v chunks per rank (rank r holds stages r, r+p, ...), p micro-batches at a time through each chunk.

    Two ranks, two chunks; small letters are the second chunk:

    rank 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .. b2 .. b3 B2 B3
    rank 1  .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 ..
    """

    def order(rank: int) -> Iterator[Action]:
        rounds = [range(start, start + p) for start in range(0, m, p)]
        stages = range(rank, p * v, p)
        forwards = [F(stage, i) for group in rounds for stage in stages for i in group]
        backwards = [B(stage, i) for group in rounds for stage in reversed(stages) for i in group]
        warm = _warm(p, m, v, rank)
        yield from forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - warm :]

    return Schedule.one_route(order, ranks=p, microbatches=m, chunks=v)
