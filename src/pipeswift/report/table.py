"""The figures of timelines as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from pipeswift.report.summary import Summary


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
