"""Naive: one micro-batch at a time."""

from collections.abc import Iterator

from pipeswift.ir import Action, B, F, Schedule
from pipeswift.schedules.registry import Idle, Peak, schedule


@schedule(
    "naive",
    paper="Huang et al. 2019, GPipe, fig. 2b (model parallelism without a pipeline)",
    bubble=Idle("m(p-1)(F+B)", lambda p, m, v, t: m * (p - 1) * (t.F + t.B)),
    memory=Peak("1", lambda p, m, v, r: 1),
)
def naive(p: int, m: int) -> Schedule:
    """Each micro-batch goes up and down all stages before the next one starts.

    rank 0  F0 .. .. .. .. B0 F1 .. .. .. .. B1
    rank 1  .. F0 .. .. B0 .. .. F1 .. .. B1 ..
    rank 2  .. .. F0 B0 .. .. .. .. F1 B1 .. ..
    """

    def order(rank: int) -> Iterator[Action]:
        for i in range(m):
            yield F(rank, i)
            yield B(rank, i)

    return Schedule.one_route(order, ranks=p, microbatches=m)
