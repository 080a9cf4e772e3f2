"""Writes the table of all schedules, computed by the simulator, into docs/schedules/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Schedule
from pipeswift.passes import transfers
from pipeswift.schedules import Entry
from pipeswift.simulate import replay
from pipeswift.trace import bubble_rate, peak_memory

RANKS, MICROBATCHES = 8, 32
README = Path(__file__).parent / "schedules" / "README.md"
BEGIN, END = "<!-- written by docs/tables.py: begin -->", "<!-- end -->"
COLUMNS = (
    "schedule",
    "bubble by span",
    "bubble by makespan",
    "peak activations",
    "parameters",
    "messages per micro-batch",
    "between",
    "asks for",
    "use it when",
)
USE_WHEN = {
    "naive": "debugging, or as the baseline that everything beats",
    "gpipe": "few micro-batches, or activations are recomputed and memory is no concern",
    "1f1b": "the backward cannot be split; the safe default",
    "interleaved-1f1b": "the backward cannot be split, messages are cheap and memory is left",
    "zb-h1": "1F1B's memory is what you have, or messages must stay few",
    "zb-h2": "twice 1F1B's memory is left and the optimizer needs no barrier",
    "zb-v": "1F1B's memory is what you have and F, I and W take about equally long",
    "v-half": "memory is short, F, I and W take about equally long",
    "dualpipe": "forward and backward woven together hide communication, and two copies of the parameters fit",
    "dualpipe-v": "likewise, with one copy, on half as many ranks for the same stages",
    "1f1b-overlap": "pairs hide communication, memory is left, and the model cannot be cut into more stages",
    "interleaved-1f1b-overlap": "pairs hide communication, messages are cheap, one copy of the parameters",
    "v-min": "memory is what keeps the model from training at all",
    "pipedream": "no time may be idle, and the model learns from gradients that are some updates old",
}


def table() -> str:
    """The table in Markdown, a row per schedule on the list."""
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += (_line(_row(entry)) for entry in schedules.entries())
    return "\n".join(lines)


def _line(cells: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(entry: Entry) -> Iterator[str]:
    schedule = schedules.build(entry.name, RANKS, MICROBATCHES)
    costs = Costs.uniform(schedule.num_stages, chunks=schedule.chunks)
    trace = replay(schedule, costs)
    yield f"[{entry.name}]({entry.name}.md)"
    yield f"{bubble_rate(trace, by='span'):.4f}"
    yield f"{bubble_rate(trace, by='makespan'):.4f}"
    yield f"{peak_memory(trace, costs.memory).max():g}"
    yield f"{schedule.parameters:g}"
    yield f"{len(transfers(schedule)) / MICROBATCHES:g}"
    yield _between(schedule)
    yield "; ".join(_asks_for(entry, schedule)) or "nothing"
    yield USE_WHEN[entry.name]


def _between(schedule: Schedule) -> str:
    pairs = {(transfer.source, transfer.destination) for transfer in transfers(schedule)}
    return "neighbours" if all(abs(a - b) == 1 for a, b in pairs) else "neighbours, and the last rank and the first"


def _asks_for(entry: Entry, schedule: Schedule) -> Iterator[str]:
    yield from (rule.text for rule in entry.rules)
    if entry.any_chunks:
        yield f"any number of chunks ({entry.chunks} here)"
    elif entry.chunks > 1:
        yield f"{entry.chunks} chunks per rank"
    if schedule.splits_backward:
        yield "a backward split into I and W"
    if not entry.flush:
        yield "a weight policy; updates inside the order"


def write(readme: Path = README) -> None:
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
