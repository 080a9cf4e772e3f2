"""V-Min: a third of 1F1B's memory, by repeating one block of passes over a V of two chunks per rank."""

from pipeswift.ir import Action, Op, Schedule, vee
from pipeswift.schedules.registry import Idle, Peak, schedule

PERIOD = 6  # passes of a rank for one micro-batch: F, I and W of two chunks


@schedule(
    "v-min",
    paper="Qi et al. 2024, Pipeline Parallelism with Controllable Memory, V-Min (where W goes is our own)",
    bubble=Idle(
        "(4p-5)F/2 if F = I = W (p a multiple of 3: 4p-4)",
        lambda p, m, v, t: (4 * p - (5 if p % 3 else 4)) * t.F / 2,
        by="span",
        holds=lambda p, m, t: p > 1 and t.equal,
    ),
    memory=Peak("min(m, (p+4)//3)", lambda p, m, v, r: min(m, (p + 4) // 3)),
    chunks=2,
)
def v_min(p: int, m: int) -> Schedule:
    """Rank r holds stages r and 2p-1-r; every six passes one micro-batch sets out, up the V and down again at once.

    Two ranks; small letters are the second chunk:

    rank 0  F0 .. .. f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 .. I2 W2
    rank 1  .. F0 f0 .. .. i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 w2 W2
    """

    def order(rank: int) -> list[Action]:
        block = _block(rank, p)
        passes = ((start + PERIOD * i, Action(stage, op, i)) for start, stage, op in block for i in range(m))
        return [action for _, action in sorted(passes)]

    return Schedule.one_route(order, ranks=p, microbatches=m, chunks=2, placement=vee)


def _block(rank: int, p: int) -> list[tuple[int, int, Op]]:
    """(start, stage, op) of what a rank does for micro-batch 0, in passes since the first F of all.

    No two of the six starts are equal modulo PERIOD, so blocks one PERIOD apart never meet. F and I go from stage to
    stage at once, but for a pause on the way that keeps them apart where p is a multiple of 3; each W takes the first
    place left after its I.
    """
    out, back = rank, 2 * p - 1 - rank
    pause = 0 if p % 3 else 2
    block = [
        (out, out, Op.F),
        (back + pause, back, Op.F),
        (4 * p - 1 - back + pause, back, Op.I),
        (4 * p - 1 - out + 2 * pause, out, Op.I),
    ]
    for start, stage, _ in block[2:]:
        taken = {other % PERIOD for other, _, _ in block}
        place = next(place for place in range(start + 1, start + 1 + PERIOD) if place % PERIOD not in taken)
        block.append((place, stage, Op.W))
    return block
