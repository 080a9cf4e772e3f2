"""Writes "which schedule when" into docs/which-schedule.md: every schedule at one size, from the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Action, Op, Schedule, loop, vee
from pipeswift.program import BlockCosts, Form, Line, Part, Program, chunk, compile_action, merge
from pipeswift.program import simulate as run
from pipeswift.schedules import ScheduleError
from pipeswift.search import search
from pipeswift.simulate import replay
from pipeswift.trace import makespan, peak_memory

RANKS, MICROBATCHES = 8, (16, 20, 32, 64)
PAGE = Path(__file__).parent / "which-schedule.md"
BEGIN, END = "<!-- written by docs/which_schedule.py: begin -->", "<!-- end -->"
WORK = 2000  # orders that a search tries
BLOCKS = 4  # per rank, of an MoE model


class Model(NamedTuple):
    """What stages are made of: dense layers, or MoE blocks whose experts are in `chunks`."""

    chunks: int | None = None

    def costs(self, stages: int, chunks: int) -> Costs:
        """Of a schedule with so many stages, `chunks` on a rank, pairs included."""
        uniform = Costs.uniform(stages, chunks=chunks)
        if self.chunks is None:
            return replace(uniform, overlap=3 / chunks)
        passes, pair = _moe(BLOCKS // chunks, self.chunks)
        return replace(uniform, seconds=np.repeat(np.array(passes)[:, None, None], stages, axis=1), overlap=pair)


@cache
def _moe(blocks: int, chunks: int) -> tuple[list[float], float]:
    """Seconds of F, I, W and B of a stage of so many blocks, and of a pair of it.

    A rank's blocks compute 1 in F, I and W each, half of it in experts; a pair's all-to-alls take what it computes.
    """
    each = 1 / BLOCKS / 2
    experts = {op: Line(0.0, each) for op in Op}
    others = {(Part.ATTENTION, op): each * (2 if op is Op.B else 1) for op in Op}
    seconds = BlockCosts(Line(0.0, 1.0), sent=3 * 2 * each / 4, experts=experts, others=others)

    def program(op: Op, microbatch: int = 0) -> Program:
        whole = compile_action(Action(0, op, microbatch), layout=(Form.MOE,) * blocks, takes=False, sends=False)
        return chunk(whole, chunks)

    pair = merge(program(Op.F), program(Op.B, 1), seconds)
    return [run(program(op), seconds).elapsed for op in Op], run(pair, seconds).elapsed


DENSE, MOE, MOE_IN_CHUNKS = Model(), Model(1), Model(2)


class Row(NamedTuple):
    """One line of a table; chunks: None where the schedule has no choice."""

    name: str
    chunks: int | None = None

    def __str__(self) -> str:
        return self.name if self.chunks is None else f"{self.name}, v = {self.chunks}"

    def schedule(self, microbatches: int, model: Model) -> Schedule | None:
        """None where the number of micro-batches does not suit."""
        try:
            return schedules.build(self.name, RANKS, microbatches, self.chunks)
        except ScheduleError:
            return None


class Searched(NamedTuple):
    """The best order found within 1F1B's memory, of one chunk per rank or of two in a V."""

    chunks: int

    def __str__(self) -> str:
        return f"searched, {'one chunk' if self.chunks == 1 else 'two chunks in a V'}, at most {RANKS} activations"

    def schedule(self, microbatches: int, model: Model) -> Schedule:
        return search(
            model.costs(RANKS * self.chunks, self.chunks),
            ranks=RANKS,
            microbatches=microbatches,
            chunks=self.chunks,
            placement=loop if self.chunks == 1 else vee,
            memory_limit=RANKS,
            objective="makespan",
            work_limit=WORK,
        ).schedule


PUBLISHED = (
    Row("1f1b"),
    Row("interleaved-1f1b", 2),
    Row("interleaved-1f1b", 4),
    Row("zb-h1"),
    Row("zb-v"),
    Row("dualpipe"),
    Row("dualpipe-v"),
    Row("1f1b-overlap"),
    Row("interleaved-1f1b-overlap", 2),
)
SEARCHED = (Searched(1), Searched(2))


def table(model: Model) -> str:
    """Markdown, a line per schedule."""
    cells = ["schedule", "activations", "parameters", *(f"m = {m}" for m in MICROBATCHES)]
    lines = (_row(row, model) for row in (*PUBLISHED, *SEARCHED))
    return "\n".join([_line(cells), _line(["---"] * len(cells)), *map(_line, lines)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(row: Row | Searched, model: Model) -> list[str]:
    made = [row.schedule(m, model) for m in MICROBATCHES]
    found = next(schedule for schedule in made if schedule)
    return [str(row), f"{_peak(found):g}", f"{found.parameters:g}", *(_step(schedule, model) for schedule in made)]


def _peak(schedule: Schedule) -> float:
    costs = Costs.uniform(schedule.num_stages, chunks=schedule.chunks)
    return round(float(peak_memory(replay(schedule, costs), costs.memory).max()), 6)


def _step(schedule: Schedule | None, model: Model) -> str:
    if schedule is None:
        return "-"
    seconds = makespan(replay(schedule, model.costs(schedule.num_stages, schedule.chunks)))
    return f"{seconds:.6g} ({1 - 3 * schedule.num_microbatches / seconds:.1%})"


def sections() -> Iterator[str]:
    """The tables of the page, in their order."""
    return map(table, (DENSE, MOE, MOE_IN_CHUNKS))


def write(page: Path = PAGE) -> None:
    before, *rest = page.read_text(encoding="utf-8").split(BEGIN)
    parts = (part.partition(END)[2] for part in rest)
    filled = (f"{BEGIN}\n\n{made}\n\n{END}{after}" for made, after in zip(sections(), parts, strict=True))
    page.write_text("".join([before, *filled]), encoding="utf-8")


if __name__ == "__main__":
    write()
