"""DualPipe: micro-batches enter at both ends, and each one's forward is woven into another's backward."""

from collections import deque
from collections.abc import Iterator

from pipeswift.ir import Action, B, F, I, Order, Overlap, Schedule, W
from pipeswift.schedules.registry import Idle, Peak, Rule, Times, schedule

TWICE = Rule("--microbatches", "at least twice as many micro-batches as --pp", lambda p, m: m >= 2 * p)


def idle_to_the_turn(ranks: int, t: Times) -> float:
    """Seconds that a rank idles, `ranks` ranks from the end to the turn, when a pair F&B lasts F + B."""
    return (ranks - 1) * (t.F + t.B + t.B - 3 * t.W)


def holds(p: int, m: int, t: Times) -> bool:
    return t.F == t.I


@schedule(
    "dualpipe",
    paper="DeepSeek-AI 2024, DeepSeek-V3 Technical Report, sec. 3.2.1 and fig. 5",
    bubble=Idle("(p/2-1)(F&B+B-3W) if F = I", lambda p, m, v, t: idle_to_the_turn(p // 2, t), holds=holds),
    memory=Peak("p+1", lambda p, m, v, r: p + 1),
    rules=(
        Rule("--pp", "an even number of ranks", lambda p, m: p % 2 == 0),
        Rule("--microbatches", "an even number of micro-batches", lambda p, m: m % 2 == 0),
        TWICE,
    ),
)
def dualpipe(p: int, m: int) -> Schedule:
    """Every stage on two ranks: rank r holds stages r and p-1-r, and half of the micro-batches enter at each end.

    Small letters are the micro-batches that enter at the last rank; F1&b2 is a woven pair, drawn here part by part:

    rank 0  F0 F1 F2 f4 i4 w4 f5 F3&b5 f6&B0 b6 .. f7&B1 b7 I2 W2 I3 W3
    rank 1  .. F0 f4 F1 f5 F2 b4 f6&B0 F3&b5 f7&B1 b6 B2 .. i7 I3 w7 W3
    rank 2  .. f4 F0 f5 F1 f6 B0 F2&b4 f7&B1 F3&b5 B2 b6 .. I3 i7 W3 w7
    rank 3  f4 f5 f6 F0 I0 W0 F1 f7&B1 F2&b4 B2 .. F3&b5 B3 i6 w6 i7 w7
    """
    half = m // 2
    entering = range(half), range(half, m)  # at rank 0, at the last rank

    def order(rank: int) -> Iterator[Action | Overlap]:
        near = 0 if rank < p // 2 else 1  # the route that enters at the nearer end
        stage = min(rank, p - 1 - rank)
        out, back = Passes(stage, entering[near]), Passes(p - 1 - stage, entering[1 - near])
        return there_and_back(out, back, outer=stage, inner=p // 2 - 1 - stage)

    up = tuple(range(p))
    return Schedule(tuple(Order.of(order(rank)) for rank in range(p)), (up, up[::-1]), (0,) * half + (1,) * half)


class Passes:
    """The passes of one stage over some micro-batches, each kind in order."""

    def __init__(self, stage: int, microbatches: range):
        self.stage, self.count = stage, len(microbatches)
        self._forward, self._backward = iter(microbatches), iter(microbatches)

    def f(self) -> Action:
        return F(self.stage, next(self._forward))

    def b(self) -> Action:
        return B(self.stage, next(self._backward))

    def i(self, owed: deque[Action]) -> Action:
        """The next backward's I; its W joins what is owed."""
        microbatch = next(self._backward)
        owed.append(W(self.stage, microbatch))
        return I(self.stage, microbatch)


def there_and_back(out: Passes, back: Passes, outer: int, inner: int) -> Iterator[Action | Overlap]:
    """What a rank does that every micro-batch passes twice: stage `out` on its way in, stage `back` on its way home.

    outer, inner: ranks between this one and the end where `out` begins, and between it and the turn.
    """
    owed: deque[Action] = deque()
    for _ in range(2 * inner):
        yield out.f()
    for _ in range(outer + 1):
        yield out.f()
        yield back.f()
    for _ in range(inner):
        yield back.i(owed)
        yield owed.popleft()
        yield back.f()
    for turn in range(out.count - 2 * inner - outer - 1):
        forward, backward = out.f(), back.b()
        # At the turn the first pair stays apart, as published: who waits for its output need not wait for both.
        yield from (forward, backward) if turn == inner == 0 else (Overlap(forward, backward),)
        yield Overlap(back.f(), out.b())
    for _ in range(inner):
        yield back.b()
        yield Overlap(back.f(), out.b())
    for turn in range(2 * (outer + 1)):
        passes = out if turn % 2 else back
        yield passes.b() if turn <= outer else passes.i(owed)
    for _ in range(inner):
        yield owed.popleft()
        yield out.i(owed)
    yield from owed
