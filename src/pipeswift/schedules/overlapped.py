"""1F1B, plain and interleaved, with forwards woven into backwards: more forwards ahead, so that no pair waits."""

from pipeswift.ir import Schedule
from pipeswift.passes import overlap
from pipeswift.schedules.interleaved import WHOLE_ROUNDS, interleaved
from pipeswift.schedules.one_f_one_b import one_f_one_b
from pipeswift.schedules.registry import Idle, Peak, schedule


@schedule(
    "1f1b-overlap",
    paper="1f1b under the pass that weaves forwards into backwards (our own)",
    bubble=Idle("(p-1)(F+B), beside pairs of F+B", lambda p, m, v, t: (p - 1) * (t.F + t.B)),
    memory=Peak("min(m, 2(p-r))", lambda p, m, v, r: min(m, 2 * (p - r))),
)
def one_f_one_b_overlap(p: int, m: int) -> Schedule:
    """1F1B in pairs: a micro-batch moves on by one rank per pair, both ways, so twice as many are under way.

    F1&B0 is a woven pair, drawn here part by part:

    rank 0  F0 F1 F2 F3 F4 .. .. F5&B0 B1 .. B2 B3 .. B4 B5
    rank 1  .. F0 F1 F2 .. F3&B0 F4&B1 F5&B2 B3 .. B4 B5 ..
    rank 2  .. .. F0 F1&B0 F2&B1 F3&B2 F4&B3 F5&B4 B5 .. ..
    """
    return overlap(one_f_one_b(p, m))


@schedule(
    "interleaved-1f1b-overlap",
    paper="interleaved-1f1b with one forward more ahead, as DeepSeek-AI 2024 weave theirs (the order is our own)",
    bubble=Idle("(p-1)(F+B)/v, beside pairs of F+B", lambda p, m, v, t: (p - 1) * (t.F + t.B) / v),
    memory=Peak("min(m, (2(p-r) + (v-1)p)/v)", lambda p, m, v, r: min(m, (2 * (p - r) + (v - 1) * p) / v)),
    rules=(WHOLE_ROUNDS,),
    chunks=2,
    any_chunks=True,
)
def interleaved_overlap(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B in pairs: its warm-up suits them already, but for one forward more.

    Two ranks, two chunks; small letters are the second chunk, f1&b0 is a woven pair, drawn here part by part:

    rank 0  F0 F1 f0 f1 F2 .. F3&b0 f2&b1 f3&B0 B1 .. b2 b3 B2 B3
    rank 1  .. F0 F1 f0 f1&b0 F2&b1 F3&B0 f2&B1 f3&b2 b3 B2 B3 ..
    """
    return overlap(interleaved(p, m, v))
