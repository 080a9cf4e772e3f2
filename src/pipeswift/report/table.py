"""The figures of timelines as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from pipeswift.report.imbalance import Imbalance
from pipeswift.report.summary import Summary
from pipeswift.report.usage import Usage

_ROWS = 16  # of ranks or stages; there may be thousands


def facts(columns: Mapping[str, Summary]) -> Table:
    """One fact per row, one timeline per column: {"predicted": ..., "measured": ...}."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, show_header=len(columns) > 1)
    table.add_column("", style="bold")
    for title in columns:
        table.add_column(title, justify="right")
    for name, cell in _FACTS:
        table.add_row(name, *map(cell, columns.values()))
    return table


def comparison(rows: Mapping[str, Summary | str]) -> Group:
    """One schedule per row; a text instead of a Summary, shown below, says why there are no figures."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("schedule", style="bold", no_wrap=True)
    for name, _ in _FACTS:
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(cell(row) if isinstance(row, Summary) else "-" for _, cell in _FACTS))
    return Group(table, *(f"\n- {row}" for row in rows.values() if isinstance(row, str)))


def decisions(counts: Mapping[str, Sequence[int]]) -> Table:
    """How often each rule of a policy decided, in all and on each rank."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("decisions by rule", style="bold")
    for title in ("all", "by rank"):
        table.add_column(title, justify="right")
    for rule, by_rank in counts.items():
        table.add_row(rule, f"{sum(by_rank)}", " ".join(map(str, by_rank)))
    return table


def usages(rows: Mapping[str, Usage]) -> Table:
    """A row per rank; columns of what occurs on none are left out."""
    shown = [
        (title, number)
        for number, title in enumerate(Usage._fields)
        if title in ("busy", "idle") or any(row[number] for row in rows.values())
    ]
    cells = {name: [f"{100 * row[number]:.1f} %" for _, number in shown] for name, row in rows.items()}
    return _grid("share of the step", [title for title, _ in shown], cells)


def rules(ranks: Sequence[str], counts: Mapping[str, Sequence[int]], waiting: Sequence[int]) -> Table:
    """How often each rule of a policy decided on each rank, and how many micro-batches waited there at most."""
    columns = {**counts, "waiting": waiting}
    rows = zip(*columns.values(), strict=True)
    return _grid(
        "decisions by rule", list(columns), {rank: list(map(str, row)) for rank, row in zip(ranks, rows, strict=True)}
    )


def imbalances(stages: Sequence[Imbalance]) -> Table:
    """A row per stage; columns about ranks only where these share out experts."""
    columns = ["expert"] if stages[0].rank is None else ["expert", "rank", "rank, by micro-batch"]
    rows = {f"stage {row.stage}": [f"{ratio:.2f}" for ratio in row[1:] if ratio is not None] for row in stages}
    return _grid("largest load over mean", columns, rows)


def _grid(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column(title, style="bold", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in islice(rows.items(), _ROWS):
        table.add_row(name, *cells)
    if len(rows) > _ROWS:
        table.add_row(f"and {len(rows) - _ROWS} more")
    return table


def _seconds(value: float) -> str:
    return f"{value:.6g} s"


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"


def _activations(peaks: Sequence[float]) -> str:
    """Peaks per rank; "4 3 2 1", or the range where ranks are many."""
    if len(peaks) > 8:
        return f"{min(peaks):g} to {max(peaks):g}"
    return " ".join(f"{peak:g}" for peak in peaks)


_FACTS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("makespan", lambda summary: _seconds(summary.makespan)),
    ("longest span", lambda summary: _seconds(summary.longest_span)),
    ("bubble by span", lambda summary: _share(summary.bubble_rate_span)),
    ("bubble by makespan", lambda summary: _share(summary.bubble_rate_makespan)),
    ("peak activations per rank", lambda summary: _activations(summary.peak_activations)),
    ("parameters", lambda summary: f"x {summary.parameters:g}"),
)


def quartiles(rows: Mapping[str, Sequence[float]], title: str) -> Table:
    """A row per name: the lower quartile, the median and the upper quartile of its numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column(title, style="bold")
    for column in ("quartile", "median", "quartile"):
        table.add_column(column, justify="right")
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.6g}" for value in np.quantile(values, (0.25, 0.5, 0.75))))
    return table
