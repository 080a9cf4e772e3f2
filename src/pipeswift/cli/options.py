"""The options that commands share: a schedule's size, and what its passes cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from pipeswift.cost import Costs
from pipeswift.ir import Schedule

SHORTEST, LONGEST = 1e-9, 1e9  # seconds that a pass may take


def number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    """The parser of an option that is a number from `low` to `high`, which NaN is not."""
    what = "whole number" if kind is int else "number"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise typer.BadParameter(f"{text} is not a {what} from {low:g} to {high:g}. Use 1, say.")
        return value

    return parse


def count(flag: str, metavar: str, what: str):
    """An option that is a whole number of at least 1."""
    return typer.Option(flag, parser=number(int, 1, 1e9), help=what, metavar=metavar)


def _seconds(flag: str, what: str, low: float = SHORTEST):
    return typer.Option(flag, parser=number(float, low, LONGEST), help=what, metavar="SECONDS")


Ranks = Annotated[int | None, count("--pp", "P", "Pipeline ranks.")]
Microbatches = Annotated[int | None, count("--microbatches", "M", "Micro-batches per step.")]
Chunks = Annotated[int | None, count("--chunks", "V", "Stages per rank, for schedules with a choice.")]
Forward = Annotated[float, _seconds("-F", "Forward of one micro-batch on one rank; a chunk takes its share.")]
InputGradient = Annotated[float, _seconds("-I", "Backward for the input's gradient, likewise.")]
WeightGradient = Annotated[float, _seconds("-W", "Backward for the weights' gradient, likewise; B is I + W.")]
Comm = Annotated[float, _seconds("--comm", "How long a message is under way from rank to rank.", low=0)]
OverlapCost = Annotated[
    float | None,
    _seconds(
        "--overlap-cost", "A forward and a backward woven into each other, likewise; without it they take their sum."
    ),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        "--memory-limit",
        parser=number(float, SHORTEST, LONGEST),
        metavar="ACTIVATIONS",
        help="The most a rank may hold; 1 is its share of the model for one micro-batch.",
    ),
]


def uniform(
    schedule: Schedule,
    forward: float,
    input_gradient: float,
    weight_gradient: float,
    comm: float,
    overlap_cost: float | None = None,
) -> Costs:
    """The costs that -F, -I, -W, --comm and --overlap-cost stand for."""
    costs = Costs.uniform(
        schedule.num_stages, F=forward, I=input_gradient, W=weight_gradient, chunks=schedule.chunks, comm=comm
    )
    return costs if overlap_cost is None else replace(costs, overlap=overlap_cost / schedule.chunks)
