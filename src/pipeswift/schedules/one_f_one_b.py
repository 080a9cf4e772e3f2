"""1F1B: one forward, one backward."""

from collections.abc import Iterator

from pipeswift.ir import Action, B, F, Schedule
from pipeswift.schedules.registry import Idle, Peak, schedule


@schedule(
    "1f1b",
    paper="Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training, sec. 3 (PipeDream-Flush)",
    bubble=Idle("(p-1)(F+B)", lambda p, m, v, t: (p - 1) * (t.F + t.B)),
    memory=Peak("min(m, p-r)", lambda p, m, v, r: min(m, p - r)),
)
def one_f_one_b(p: int, m: int) -> Schedule:
    """Warm up with at most p-1-r forwards, then alternate, then drain.

    rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
    """

    def order(rank: int) -> Iterator[Action]:
        warm = min(m, p - 1 - rank)
        yield from (F(rank, i) for i in range(warm))
        for i in range(m - warm):
            yield F(rank, warm + i)
            yield B(rank, i)
        yield from (B(rank, i) for i in range(m - warm, m))

    return Schedule.one_route(order, ranks=p, microbatches=m)
