"""A timeline as text: a row per rank, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeswift.report.palette import HUES, chunk_of, ink, shade
from pipeswift.trace import COMPUTE, Trace, makespan

if TYPE_CHECKING:
    from rich.text import Text

IDLE = -1


class Piece(NamedTuple):
    """A run of characters of one row."""

    text: str
    op: int = IDLE
    chunk: int = 0


class Bar(NamedTuple):
    """One pass on the grid: columns first to last (exclusive)."""

    first: int
    last: int
    label: str
    op: int
    chunk: int


def draw(trace: Trace, width: int = 160) -> str:
    """The compute lane of every rank, one line per rank.

    When starts and ends fall on a grid that fits into `width` characters, a cell is one tick of that grid: "F0" is
    micro-batch 0's forward, dashes carry on a pass longer than a tick, dots are idle. Otherwise time is scaled to
    `width` characters. Ranks with several stages show the stage: "2F5". Where only a letter fits, those of a rank's
    later stages are in lower case.

        F0 F1 .. .. B0--- .. B1---
        .. F0 B0--- F1 B1--- .. ..

    Raises EmptyTrace when no span was recorded.
    """
    return "\n".join("".join(piece.text for piece in row).rstrip() for row in rows(trace, width))


def picture(trace: Trace, width: int = 160) -> Text:
    """`draw` with rank names, colours and a time axis, `width` characters in all, for a terminal."""
    from rich.text import Text

    margin = len(f"rank {trace.num_ranks - 1} ")
    chunks = int(chunk_of(trace).max(initial=0)) + 1
    text = Text(no_wrap=True, overflow="crop")
    longest = 0
    for rank, row in enumerate(rows(trace, max(width - margin, 1))):
        text.append(f"rank {rank}".ljust(margin), "bold")
        for piece in row:
            text.append(piece.text, _style(piece, chunks))
        text.append("\n")
        longest = max(longest, len("".join(piece.text for piece in row).rstrip()))
    end = f"{makespan(trace):.6g}"
    text.append(" " * margin + "0" + end.rjust(max(longest - 1, len(end) + 1)), "dim")
    return text


def rows(trace: Trace, width: int) -> Iterator[list[Piece]]:
    """The pieces of each rank's line."""
    total, origin = makespan(trace), trace.start.min()
    trace = trace.only(trace.lane == COMPUTE)
    chunk = chunk_of(trace)
    named = _labels(trace, show_stage=bool(chunk.any()))
    cell = max(map(len, named), default=1)
    tick = _tick(np.concatenate([trace.start, trace.end])) or total or 1.0
    exact = total / tick * (cell + 1) <= width
    columns = max(round(total / tick), 1) if exact else width
    unit = tick if exact else total / width
    bars: list[list[Bar]] = [[] for _ in range(trace.num_ranks)]
    edges = np.rint((np.stack([trace.start, trace.end]) - origin) / unit).astype(int).tolist()
    for rank, *bar in zip(trace.rank.tolist(), *edges, named, trace.op.tolist(), chunk.tolist(), strict=True):
        bars[rank].append(Bar(*bar))
    fill = _cells if exact else _scaled
    return (fill(mine, columns, cell) for mine in bars)


def _cells(bars: list[Bar], columns: int, cell: int) -> list[Piece]:
    """One cell per tick, cells apart by a blank."""
    row: list[Piece] = []
    now = 0
    idle = Piece("." * cell + " ")
    for first, last, label, op, chunk in bars:
        first = max(first, now)
        if last <= first:
            continue
        row += [idle] * (first - now)
        dashes = (cell + 1) * (last - first - 1)
        row += [Piece((label.ljust(cell, "-") + "-" * dashes) if dashes else label.ljust(cell), op, chunk), Piece(" ")]
        now = last
    return row + [idle] * (columns - now)


def _scaled(bars: list[Bar], columns: int, _cell: int) -> list[Piece]:
    """One character per column; a label where it leaves room for a dash, else the op's letter."""
    row: list[Piece] = []
    now = 0
    for first, last, label, op, chunk in bars:
        first = max(first, now)
        if last <= first:
            continue
        row.append(Piece("." * (first - now)))
        letter = "fiwb"[op] if chunk else "FIWB"[op]
        row.append(Piece((label if len(label) < last - first else letter).ljust(last - first, "-"), op, chunk))
        now = last
    return [*row, Piece("." * (columns - now))]


def _labels(trace: Trace, show_stage: bool) -> list[str]:
    spans = zip(trace.stage.tolist(), trace.op.tolist(), trace.microbatch.tolist(), strict=True)
    if show_stage:
        return [f"{stage}{'FIWB'[op]}{microbatch}" for stage, op, microbatch in spans]
    return [f"{'FIWB'[op]}{microbatch}" for _, op, microbatch in spans]


def _tick(times: np.ndarray) -> float:
    """The largest step of a grid on which all `times` lie (Euclid's algorithm); 0 when they are all equal."""
    times = np.unique(times)
    noise = 1e-6 * (times[-1] - times[0]) if len(times) else 0.0
    gaps = np.diff(times)
    gaps = gaps[gaps > noise]
    while len(gaps):
        step = gaps.min()
        rest = np.abs(gaps - step * np.rint(gaps / step))
        rest = np.unique(rest[rest > noise])
        if not len(rest):
            return float(step)
        gaps = np.append(rest, step)
    return 0.0


def _style(piece: Piece, chunks: int) -> str:
    if piece.op == IDLE:
        return "dim"
    background = shade(HUES[piece.op], piece.chunk, chunks)
    return f"{ink(background)} on {background}"
