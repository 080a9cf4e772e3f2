"""GPipe: all forwards, then all backwards."""

from collections.abc import Iterator

from pipeswift.ir import Action, B, F, Schedule
from pipeswift.schedules.registry import Idle, Peak, schedule


@schedule(
    "gpipe",
    paper="Huang et al. 2019, GPipe, sec. 2.3 and fig. 2c",
    bubble=Idle("(p-1)(F+B)", lambda p, m, v, t: (p - 1) * (t.F + t.B)),
    memory=Peak("m", lambda p, m, v, r: m),
)
def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards. The backwards, too, go in the order of the micro-batches.

    rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..
    """

    def order(rank: int) -> Iterator[Action]:
        yield from (F(rank, i) for i in range(m))
        yield from (B(rank, i) for i in range(m))

    return Schedule.one_route(order, ranks=p, microbatches=m)
