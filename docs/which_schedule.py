"""Writes "which schedule when" into docs/which-schedule.md: every schedule at one size, from the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Schedule, loop, vee
from pipeswift.schedules import ScheduleError
from pipeswift.search import search
from pipeswift.simulate import replay
from pipeswift.trace import bubble_rate, makespan, peak_memory

RANKS, MICROBATCHES = 8, (16, 20, 32, 64)
PAGE = Path(__file__).parent / "which-schedule.md"
BEGIN, END = "<!-- written by docs/which_schedule.py: begin -->", "<!-- end -->"
WORK = 2000  # orders that a search tries


class Row(NamedTuple):
    """One line of a table; chunks: None where the schedule has no choice."""

    name: str
    chunks: int | None = None

    def __str__(self) -> str:
        return self.name if self.chunks is None else f"{self.name}, v = {self.chunks}"

    def schedule(self, microbatches: int) -> Schedule | None:
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

    def schedule(self, microbatches: int) -> Schedule:
        return search(
            Costs.uniform(RANKS * self.chunks, chunks=self.chunks),
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


def table(rows: tuple[Row | Searched, ...], pair: float) -> str:
    """Markdown. pair: seconds of a forward and a backward woven into each other."""
    cells = ["schedule", "activations", "parameters", *(f"m = {m}" for m in MICROBATCHES)]
    return "\n".join([_line(cells), _line(["---"] * len(cells)), *(_line(_row(row, pair)) for row in rows)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(row: Row | Searched, pair: float) -> list[str]:
    made = [row.schedule(m) for m in MICROBATCHES]
    found = next(schedule for schedule in made if schedule)
    return [str(row), f"{_peak(found):g}", f"{found.parameters:g}", *(_step(schedule, pair) for schedule in made)]


def _peak(schedule: Schedule) -> float:
    costs = Costs.uniform(schedule.num_stages, chunks=schedule.chunks)
    return round(float(peak_memory(replay(schedule, costs), costs.memory).max()), 6)


def _step(schedule: Schedule | None, pair: float) -> str:
    if schedule is None:
        return "-"
    costs = Costs.uniform(schedule.num_stages, chunks=schedule.chunks)
    trace = replay(schedule, replace(costs, overlap=pair / schedule.chunks))
    return f"{makespan(trace):g} ({bubble_rate(trace, by='makespan'):.1%})"


def sections() -> Iterator[str]:
    """The tables of the page, in their order."""
    yield table((*PUBLISHED, *SEARCHED), pair=3)
    yield table(tuple(row for row in PUBLISHED if row.schedule(32).overlaps), pair=2)


def write(page: Path = PAGE) -> None:
    before, *rest = page.read_text(encoding="utf-8").split(BEGIN)
    parts = (part.partition(END)[2] for part in rest)
    filled = (f"{BEGIN}\n\n{made}\n\n{END}{after}" for made, after in zip(sections(), parts, strict=True))
    page.write_text("".join([before, *filled]), encoding="utf-8")


if __name__ == "__main__":
    write()
