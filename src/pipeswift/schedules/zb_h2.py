"""ZB-H2: ZB-H1 with twice the memory, enough to fill the warm-up too."""

from collections.abc import Iterator

from pipeswift.ir import Action, Schedule
from pipeswift.schedules.registry import Idle, Peak, schedule
from pipeswift.schedules.zb_h1 import i_w_f_in_turn


@schedule(
    "zb-h2",
    paper="Qi et al. 2024, Zero Bubble Pipeline Parallelism, sec. 2.2 and fig. 3",
    bubble=Idle(
        "(p-1)(F+I-2W)",
        lambda p, m, v, t: max(0.0, (p - 1) * (t.F + t.I) - (min(m, 2 * p - 1) - 1) * t.W),
        by="span",
        holds=lambda p, m, t: t.W <= t.F,
    ),
    memory=Peak("min(m, 2p-1)", lambda p, m, v, r: min(m, 2 * p - 1)),
)
def zb_h2(p: int, m: int) -> Schedule:
    """Warm up with 2(p-r)-1 forwards, then I, W, F in turn; rank r holds each W back by 2r micro-batches.

    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .. ..
    rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ..
    rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """

    def order(rank: int) -> Iterator[Action]:
        return i_w_f_in_turn(rank, m, warm=min(m, 2 * (p - rank) - 1), late=min(m, 2 * rank))

    return Schedule.one_route(order, ranks=p, microbatches=m)
