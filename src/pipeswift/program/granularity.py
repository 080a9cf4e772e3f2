"""Granularity: in how many chunks a program of an MoE block is fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor, inf, sqrt

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op
from pipeswift.program.arrange import arrange
from pipeswift.program.chunks import chunk
from pipeswift.program.costs import BlockCosts
from pipeswift.program.steps import Part, Program
from pipeswift.program.timeline import simulate

_GAIN = 0.005  # the share of time that more chunks have to save


@dataclass(frozen=True)
class Choice:
    """A number of chunks, and the simulated seconds of the program by each number that was tried."""

    chunks: int
    seconds: Mapping[int, float]


@dataclass(frozen=True)
class Grain:
    """How the passes of a stage with experts are cut: chunks in a forward, and in a backward.

    costs: what its works take, where that is known; the works are then in the order that it suggests.
    """

    forward: int = 1
    backward: int = 1
    costs: BlockCosts | None = None

    def cut(self, program: Program, op: Op) -> Program:
        """The program of a pass, given whole; its local tokens go first."""
        pieces = chunk(program, self.forward if op is Op.F else self.backward, local_first=True)
        return pieces if self.costs is None else arrange(pieces, self.costs)


WHOLE = Grain()


def choose(program: Program, costs: BlockCosts, *, most: int, chunks: int | None = None) -> Choice:
    """In how many chunks a whole program is fastest, as simulated; of two that are equal to half a per cent, the fewer.

    Tries one chunk and the neighbours of both square-root formulas, and goes on from the best as long as that helps.
    Forward and backward want different numbers: give each its own program. With local tokens (`costs.local` above 0)
    they go first.
    most: the experts on a rank, since chunks are groups of them. chunks: this number instead, whatever it costs.
    Raises PipeSwiftError when `chunks` is not from 1 to `most`.
    """
    seconds: dict[int, float] = {}

    def cost(number: int) -> float:
        if number not in seconds:
            cut = chunk(program, number, local_first=costs.local > 0)
            seconds[number] = simulate(cut, costs).elapsed
        return seconds[number]

    if chunks is not None:
        if not 1 <= chunks <= most:
            raise PipeSwiftError(
                f"chunks are groups of a rank's {most} experts: got chunks={chunks}; use a number from 1 to {most}"
            )
        cost(chunks)
        return Choice(chunks, seconds)
    best = min(_starts(program, costs, most), key=cost)
    while (better := min((n for n in (best - 1, best, best + 1) if 1 <= n <= most), key=cost)) != best:
        best = better
    allowed = cost(best) * (1 + _GAIN)
    return Choice(min(number for number in seconds if cost(number) <= allowed), dict(sorted(seconds.items())))


def formulas(program: Program, costs: BlockCosts) -> tuple[float, float]:
    """(where compute is longer, where communication is): the square roots of the two closed forms of a block's time.

    2 alpha + 2 n beta / r + r alpha_e + n_e beta_e is least at sqrt(2 n beta / alpha_e); 2 r alpha + 2 n beta + the
    first chunk's n_e beta_e / r at sqrt(n_e beta_e / (2 alpha)). alpha, beta: of the all-to-all, n bytes; alpha_e,
    beta_e: of the experts. In a B weight gradients hide the last all-to-all, so the first form has n beta / r once and
    alpha_e of I and of W. Infinite where chunks cost nothing.
    """
    ops = {work.op for work in program.works if work.part is Part.EXPERTS}
    start = sum(costs.experts[op].fixed for op in ops)
    shown = costs.sent * costs.exchange.each * (1 if Op.W in ops else 2)
    first = costs.experts[Op.F if Op.F in ops else Op.I].each
    return _root(shown, start), _root(first, 2 * costs.exchange.fixed)


def rule_of_thumb(program: Program, costs: BlockCosts, most: int) -> list[int]:
    """The numbers of chunks at which one chunk's communication takes .6 to 1.2 of its compute; often none, or all."""
    ops = {work.op for work in program.works if work.part is Part.EXPERTS}

    def ratio(number: int) -> float:
        compute = sum(costs.experts[op](1 / number) for op in ops)
        return 2 * costs.exchange(costs.sent / number) / compute if compute else inf

    return [number for number in range(1, most + 1) if 0.6 <= ratio(number) <= 1.2]


def _starts(program: Program, costs: BlockCosts, most: int) -> Iterator[int]:
    yield 1
    for root in formulas(program, costs):
        root = min(root, most)
        yield from (min(max(number, 1), most) for number in (floor(root), ceil(root)))


def _root(over: float, under: float) -> float:
    return sqrt(over / under) if under else inf
