"""DualPipeV: DualPipe cut in half, on ranks that hold two chunks laid out as a V, and each stage once."""

from collections.abc import Iterator

from pipeswift.ir import Action, Overlap, Schedule, vee
from pipeswift.schedules.dualpipe import TWICE, Passes, holds, idle_to_the_turn, there_and_back
from pipeswift.schedules.registry import Idle, Peak, schedule


@schedule(
    "dualpipe-v",
    paper="Qi et al. 2025, DualPipe could be better without the Dual (Cut-in-half)",
    bubble=Idle("(p-1)(F&B+B-3W)/2 if F = I", lambda p, m, v, t: idle_to_the_turn(p, t) / 2, holds=holds),
    memory=Peak("p+1/2", lambda p, m, v, r: p + 0.5),
    rules=(TWICE,),
    chunks=2,
)
def dualpipe_v(p: int, m: int) -> Schedule:
    """Rank r holds stages r and 2p-1-r, and does what rank r of DualPipe over 2p ranks does, for all micro-batches.

    Small letters are the second chunk, on the way back; F3&b1 is a woven pair, drawn here part by part:

    rank 0  F0 F1 F2 f0 i0 w0 f1 F3&b1 f2&B0 b2 .. f3&B1 b3 I2 W2 I3 W3
    rank 1  .. F0 f0 F1 f1 F2 b0 f2&B0 F3&b1 f3&B1 b2 B2 .. i3 I3 w3 W3
    """

    def order(rank: int) -> Iterator[Action | Overlap]:
        out, back = Passes(rank, range(m)), Passes(2 * p - 1 - rank, range(m))
        return there_and_back(out, back, outer=rank, inner=p - 1 - rank)

    return Schedule.one_route(order, ranks=p, microbatches=m, chunks=2, placement=vee)
