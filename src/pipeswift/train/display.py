"""What a run shows on the terminal while it goes on: a live view, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeswift.train.metrics import Row, Step

_LINES_PER_RUN = 25
_SHOWN_RANKS = 16


class Display(Protocol):
    def show(self, row: Row) -> None: ...


@contextmanager
def display(steps: int) -> Iterator[Display]:
    """The display that suits standard output, for a run of so many steps."""
    if not sys.stdout.isatty():
        yield Lines(steps)
        return
    view = LiveView(steps)
    with Live(get_renderable=view.render, refresh_per_second=4, transient=True):
        yield view


class Lines:
    """A line for every evaluation, and for some of the steps between."""

    def __init__(self, steps: int):
        self._every = max(steps // _LINES_PER_RUN, 1)

    def show(self, row: Row) -> None:
        if row.held_out is not None or row.step % self._every == 0:
            print(describe(row), flush=True)


class LiveView:
    """A progress bar, the latest figures, and how busy every rank is."""

    def __init__(self, steps: int):
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("left"), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("train", total=steps)
        self._row = Row(step=0)

    def show(self, row: Row) -> None:
        held_out = self._row.held_out if row.held_out is None else row.held_out
        self._row = replace(row, held_out=held_out)
        self._progress.update(self._task, completed=row.step)

    def render(self) -> Group:
        return Group(self._progress, Text(describe(self._row)), self._ranks())

    def _ranks(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        shares = self._row.training.utilization if self._row.training else ()
        for rank, share in enumerate(shares[:_SHOWN_RANKS]):
            grid.add_row(f"rank {rank}", ProgressBar(total=1, completed=share, width=40), f"{share:4.0%} busy")
        if len(shares) > _SHOWN_RANKS:
            grid.add_row(f"and {len(shares) - _SHOWN_RANKS} more")
        return grid


def describe(row: Row) -> str:
    """One row as one line."""
    words = [f"step {row.step:>4}"]
    if step := row.training:
        words += [f"loss {step.loss:.3f}", f"{step.tokens_per_second:,.0f} tokens/s", f"busy {_shares(step)}"]
    if row.held_out is not None:
        words.append(f"held-out {row.held_out:.3f}")
    return "  ".join(words)


def _shares(step: Step) -> str:
    return " ".join(f"{share:.0%}" for share in step.utilization[:_SHOWN_RANKS])
