"""`pipeswift compare`: several schedules under the same costs."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeswift import schedules
from pipeswift.cli import options, output, source
from pipeswift.errors import PipeSwiftError
from pipeswift.report import Summary, summarize
from pipeswift.simulate import replay


def compare(
    names: Annotated[list[str], typer.Argument(help="Schedules: names, or .csv or .json files.", metavar="NAME...")],
    pp: options.Ranks = None,
    microbatches: options.Microbatches = None,
    chunks: options.Chunks = None,
    forward: options.Forward = 1.0,
    input_gradient: options.InputGradient = 1.0,
    weight_gradient: options.WeightGradient = 1.0,
    comm: options.Comm = 0.0,
    overlap_cost: options.OverlapCost = None,
) -> None:
    """Simulate schedules side by side; one that these numbers do not suit says why in its row."""

    def row(name: str) -> Summary | str:
        try:
            schedule = source.get(name, pp, microbatches, chunks if _takes_chunks(name) else None)
            costs = options.uniform(schedule, forward, input_gradient, weight_gradient, comm, overlap_cost)
            return summarize(schedule, replay(schedule, costs))
        except PipeSwiftError as error:
            return str(error)

    for name in names:
        source.require_size(name, pp, microbatches, chunks)
    rows = {name: row(name) for name in names}

    from pipeswift.report.table import comparison

    output.console().print(comparison(rows))
    if all(isinstance(found, str) for found in rows.values()):
        raise typer.Exit(1)


def _takes_chunks(name: str) -> bool:
    return source.is_file(name) or schedules.entry(name).any_chunks
