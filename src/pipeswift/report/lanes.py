"""One rank's lanes as text: a row per lane, time from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipeswift.report.palette import HUES, ink, shade

if TYPE_CHECKING:
    from rich.text import Text


class Bar(NamedTuple):
    """Something that kept a lane busy. op: F, I, W, B = 0, 1, 2, 3. shade: 0, or 1 for a paler colour."""

    start: float
    end: float
    label: str
    op: int
    shade: int = 0


class Piece(NamedTuple):
    """A run of characters of one row; `bar` is None where the lane is idle."""

    text: str
    bar: Bar | None


def draw(lanes: Mapping[str, Sequence[Bar]], width: int = 160) -> str:
    """A line per lane, `width` characters for the whole time; bars of a lane must not overlap.

    A label stands where it leaves room for a dash, its first letter where not; dots are idle.

        compute    A..E0--E1--..M
        all-to-all .D0D1-.C0-C1-
    """
    margin = _margin(lanes)
    lines = (f"{name:<{margin}}{''.join(piece.text for piece in row)}" for name, row in rows(lanes, width - margin))
    return "\n".join(line.rstrip() for line in lines)


def picture(lanes: Mapping[str, Sequence[Bar]], width: int = 160) -> Text:
    """`draw` in colours and with a time axis, for a terminal."""
    from rich.text import Text

    margin = _margin(lanes)
    text = Text(no_wrap=True, overflow="crop")
    for name, row in rows(lanes, width - margin):
        text.append(name.ljust(margin), "bold")
        for piece in row:
            text.append(piece.text, _style(piece.bar))
        text.append("\n")
    text.append(" " * margin + "0" + f"{_elapsed(lanes):.6g}".rjust(max(width - margin - 1, 1)), "dim")
    return text


def rows(lanes: Mapping[str, Sequence[Bar]], width: int) -> Iterator[tuple[str, list[Piece]]]:
    """The pieces of each lane's line, `width` characters in all."""
    unit = _elapsed(lanes) / max(width, 1) or 1.0
    return ((name, _row(bars, unit, width)) for name, bars in lanes.items())


def _row(bars: Iterable[Bar], unit: float, width: int) -> list[Piece]:
    row: list[Piece] = []
    now = 0
    for bar in bars:
        first, last = max(round(bar.start / unit), now), round(bar.end / unit)
        if last <= first:
            continue
        text = bar.label if len(bar.label) < last - first or len(bar.label) == 1 else bar.label[0]
        row += [Piece("." * (first - now), None), Piece(text.ljust(last - first, "-"), bar)]
        now = last
    return [*row, Piece("." * (width - now), None)]


def _elapsed(lanes: Mapping[str, Sequence[Bar]]) -> float:
    return max((bar.end for bars in lanes.values() for bar in bars), default=0.0)


def _margin(lanes: Mapping[str, Sequence[Bar]]) -> int:
    return max(map(len, lanes), default=0) + 1


def _style(bar: Bar | None) -> str:
    if bar is None:
        return "dim"
    background = shade(HUES[bar.op], bar.shade, 3)
    return f"{ink(background)} on {background}"
