"""A timeline as text: a row per rank, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeswift.report.palette import HUES, chunk_of, ink, shade, shares_time
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
    """What stands in columns first to last (exclusive): one pass, or those that share the time, as its pieces."""

    first: int
    last: int
    pieces: tuple[Piece, ...]  # text: the whole label

    @property
    def label(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def draw(trace: Trace, width: int = 160) -> str:
    """The compute lane of every rank, one line per rank.

    When starts and ends fall on a grid that fits into `width` characters, a cell is one tick of that grid: "F0" is
    micro-batch 0's forward, dashes carry on a pass longer than a tick, dots are idle. Otherwise time is scaled to
    `width` characters. Ranks with several stages show the stage: "2F5". Where only a letter fits, those of a rank's
    later stages are in lower case. Passes that share the time, woven into each other, share a bar: "F4&B1---".

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
    tick = _tick(np.concatenate([trace.start, trace.end])) or total or 1.0
    bars = _bars(trace, origin, tick, list(map(Piece, named, trace.op.tolist(), chunk.tolist())))
    cell = max((_cell(bar) for mine in bars for bar in mine), default=1)
    if total / tick * (cell + 1) <= width:
        columns = max(round(total / tick), 1)
        return (_cells(mine, columns, cell) for mine in bars)
    bars = _bars(trace, origin, total / width, list(map(Piece, named, trace.op.tolist(), chunk.tolist())))
    return (_scaled(mine, width) for mine in bars)


def _bars(trace: Trace, origin: float, unit: float, pieces: list[Piece]) -> list[list[Bar]]:
    """Each rank's bars on a grid of `unit` seconds; passes that overlap in time become one."""
    bars: list[list[Bar]] = [[] for _ in range(trace.num_ranks)]
    edges = np.rint((np.stack([trace.start, trace.end]) - origin) / unit).astype(int).tolist()
    for rank, first, last, shared, piece in zip(
        trace.rank.tolist(), *edges, shares_time(trace).tolist(), pieces, strict=True
    ):
        mine = bars[rank]
        if shared and mine:
            before = mine.pop()
            with_it = Piece(f"&{piece.text}", piece.op, piece.chunk)
            mine.append(Bar(before.first, max(before.last, last), (*before.pieces, with_it)))
        else:
            mine.append(Bar(first, last, (piece,)))
    return bars


def _cell(bar: Bar) -> int:
    """Characters that a tick needs for the bar's label; that of a single pass is to fit into one tick."""
    ticks = bar.last - bar.first if len(bar.pieces) > 1 else 1
    return ceil((len(bar.label) + 1) / max(ticks, 1)) - 1


def _cells(bars: list[Bar], columns: int, cell: int) -> list[Piece]:
    """One cell per tick, cells apart by a blank."""
    row: list[Piece] = []
    now = 0
    idle = Piece("." * cell + " ")
    for first, last, pieces in bars:
        first = max(first, now)
        if last <= first:
            continue
        row += [idle] * (first - now)
        row += [*_filled(pieces, (cell + 1) * (last - first) - 1, "-" if last - first > 1 else " "), Piece(" ")]
        now = last
    return row + [idle] * (columns - now)


def _scaled(bars: list[Bar], columns: int) -> list[Piece]:
    """One character per column; a label where it leaves room for a dash, else the op's letter."""
    row: list[Piece] = []
    now = 0
    for bar in bars:
        first, last = max(bar.first, now), bar.last
        if last <= first:
            continue
        row.append(Piece("." * (first - now)))
        room = last - first
        pieces = bar.pieces if len(bar.label) < room else _letters(bar.pieces, room)
        row += _filled(pieces, room, "-")
        now = last
    return [*row, Piece("." * (columns - now))]


def _filled(pieces: Sequence[Piece], room: int, filler: str) -> list[Piece]:
    """The pieces on `room` characters, the last one carried on to the end."""
    *before, last = pieces
    return [*before, last._replace(text=last.text.ljust(room - sum(len(piece.text) for piece in before), filler))]


def _letters(pieces: Sequence[Piece], room: int) -> Sequence[Piece]:
    """A letter for each of the pieces; where there is no room for that, one sign that several passes are there."""
    if room < len(pieces):
        return [pieces[0]._replace(text="&")]
    return [piece._replace(text=("fiwb" if piece.chunk else "FIWB")[piece.op]) for piece in pieces]


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
