"""What a run shows on the terminal: a live view, or plain lines where there is no terminal, and the closing table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeswift.ir import Op
from pipeswift.policy.diary import tally
from pipeswift.program import BlockCosts, Grain
from pipeswift.report import summarize
from pipeswift.report.straggler import straggler
from pipeswift.report.table import facts
from pipeswift.trace import QUEUE_DEPTH
from pipeswift.train.comparison import Comparison
from pipeswift.train.metrics import Outcome, Row, Step

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


def close(outcome: Outcome, comparison: Comparison, folder: Path) -> None:
    """Prints the closing table: a step as predicted and as measured, then what the run achieved."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    both = {"predicted": comparison.predicted, "measured": comparison.passes}
    whose = f", of the first of {outcome.copies} copies of the pipeline" if outcome.copies > 1 else ""
    console.print(f"A late step of median length{whose}:")
    console.print(facts({title: summarize(comparison.schedule, trace) for title, trace in both.items()}))
    console.print(f"The step took {comparison.error:+.1%} against the replay of the durations measured in it.")
    for line in chain(_decisions(outcome), _grains(outcome.grains)):
        console.print(line)
    if (slow := straggler(outcome.late_steps)) is not None:
        console.print(str(slow))
    sizes = " ".join(map(str, outcome.cut.layout[:_SHOWN_RANKS]))
    console.print(f"Layers per stage: {sizes}{', cut by profile.json' if outcome.cut.profile else ''}.")
    threads, ranks = outcome.threads, outcome.ranks_here
    console.print(
        f"{_count(ranks, 'rank')} of {_count(threads, 'thread')} shared {_count(outcome.cores, 'core')}"
        + ("; a pass lasts longer while it waits for a core." if ranks * threads > outcome.cores else ".")
    )
    console.print(
        f"Held-out loss {outcome.first_held_out:.3f} -> {outcome.held_out:.3f} nats per byte; "
        f"{outcome.tokens_per_second:,.0f} tokens/s; {outcome.seconds:.1f} s of training."
    )
    console.print(f"{folder} has config.toml, metrics.csv, timeline.svg and trace.json (opens in ui.perfetto.dev).")


def _decisions(outcome: Outcome) -> Iterator[str]:
    """How often each rule decided in the last step, and how much work waited, for a policy that decides."""
    trace = outcome.late_steps[-1]
    for rule, by_rank in tally(trace.counters, trace.num_ranks).items():
        yield f"Rule {rule:8} decided {sum(by_rank):4} times in the last step, by rank {' '.join(map(str, by_rank))}."
    depths = [counter for counter in trace.counters if counter.name == QUEUE_DEPTH]
    if depths:
        deepest = " ".join(str(int(counter.value.max(initial=0))) for counter in depths)
        yield f"At most so many micro-batches waited on each rank: {deepest}."


def _grains(grains: Mapping[int, Grain]) -> Iterator[str]:
    """In how many chunks experts were, and from which costs, averaged over stages, if they were measured."""
    if not grains:
        return
    shown = ", ".join(f"{grain.forward}/{grain.backward}" for grain in list(grains.values())[:_SHOWN_RANKS])
    yield f"Chunks of a rank's experts, forward/backward, by stage: {shown}."
    if costs := [grain.costs for grain in grains.values() if grain.costs is not None]:
        mean = BlockCosts.mean(costs)
        exchange, forward = mean.exchange, mean.experts[Op.F]
        yield (
            f"Measured: an all-to-all takes {1e3 * exchange.fixed:.2f} ms + {1e3 * mean.sent * exchange.each:.2f} ms "
            f"for {mean.sent / 1e6:.2f} MB, experts {1e3 * forward.fixed:.2f} ms a chunk + {1e3 * forward.each:.2f} ms."
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
