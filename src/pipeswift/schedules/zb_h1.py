"""ZB-H1: 1F1B with the weight gradients held back, at the memory of 1F1B's first rank."""

from collections.abc import Iterator

from pipeswift.ir import Action, F, I, Schedule, W
from pipeswift.schedules.registry import Idle, Peak, schedule


@schedule(
    "zb-h1",
    paper="Qi et al. 2024, Zero Bubble Pipeline Parallelism, sec. 2.1 and fig. 3",
    bubble=Idle(
        "(p-1)(F+I-W)",
        lambda p, m, v, t: (p - 1) * (t.F + t.I) - (min(m, p) - 1) * t.W,
        holds=lambda p, m, t: t.W <= t.F,
    ),
    memory=Peak("min(m, p)", lambda p, m, v, r: min(m, p)),
)
def zb_h1(p: int, m: int) -> Schedule:
    """Warm up with p-r forwards, then I, W, F in turn; rank r holds each W back by r micro-batches.

    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """

    def order(rank: int) -> Iterator[Action]:
        return i_w_f_in_turn(rank, m, warm=min(m, p - rank), late=min(m, rank))

    return Schedule.one_route(order, ranks=p, microbatches=m)


def i_w_f_in_turn(stage: int, m: int, *, warm: int, late: int) -> Iterator[Action]:
    """`warm` forwards, then I, W, F in turn, each W `late` micro-batches behind its I."""
    yield from (F(stage, i) for i in range(warm))
    for i in range(m):
        yield I(stage, i)
        if i >= late:
            yield W(stage, i - late)
        if warm + i < m:
            yield F(stage, warm + i)
    yield from (W(stage, i) for i in range(m - late, m))
