"""ZB-V: no bubble at the memory of 1F1B, with two chunks per rank laid out as a V."""

from collections.abc import Iterator
from itertools import islice

from pipeswift.ir import Action, F, I, Schedule, W, vee
from pipeswift.schedules.registry import Idle, Peak, schedule


@schedule(
    "zb-v",
    paper="Qi et al. 2024, Zero Bubble Pipeline Parallelism, sec. 6 (the order is our own)",
    bubble=Idle("0 if F = I = W", lambda p, m, v, t: 0.0, by="span", holds=lambda p, m, t: t.equal and m >= 2 * p - 1),
    memory=Peak("min(m, p)", lambda p, m, v, r: min(m, p)),
    chunks=2,
)
def zb_v(p: int, m: int) -> Schedule:
    """Rank r holds stages r and 2p-1-r, so the last stage is next to the first and its backward comes early.

    Two ranks; small letters are the second chunk, on the way back:

    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
    """

    def order(rank: int) -> Iterator[Action]:
        out, back = _Passes(rank, m), _Passes(2 * p - 1 - rank, m)
        yield from islice(out.f, 2 * (p - rank) - 1)
        yield from _in_turn(rank, back.f, out.f)
        yield from _in_turn(p - rank, back.f, back.i, back.w)
        yield from _in_turn(m - p, out.f, out.i, out.w, back.f, back.i, back.w)
        yield from _in_turn(rank, out.i, back.i)
        yield from _in_turn(p - rank, out.i, out.w)
        yield from back.w
        yield from out.w

    return Schedule.one_route(order, ranks=p, microbatches=m, chunks=2, placement=vee)


class _Passes:
    """The F, I and W of one stage, each in micro-batch order and used up once."""

    def __init__(self, stage: int, m: int):
        self.f = (F(stage, i) for i in range(m))
        self.i = (I(stage, i) for i in range(m))
        self.w = (W(stage, i) for i in range(m))


def _in_turn(times: int, *passes: Iterator[Action]) -> Iterator[Action]:
    """One of each, `times` times over; nothing from those that are used up."""
    for _ in range(times):
        for stream in passes:
            yield from islice(stream, 1)
