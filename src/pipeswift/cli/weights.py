"""The options of schedules without flush, and what they mean for versions of the weights."""

from __future__ import annotations

from typing import Annotated, NamedTuple, cast

import typer

from pipeswift.cli import options
from pipeswift.ir import Schedule
from pipeswift.versions import WEIGHT_POLICIES, VersionError, Versions, WeightPolicy, versions

Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="POLICY",
        help=f"Without flush: what version of its weights a pass uses: {', '.join(WEIGHT_POLICIES)}; by default stash.",
    ),
]
UpdatesEvery = Annotated[
    int | None,
    typer.Option(
        "--updates-every",
        parser=options.number(int, 1, 1e9),
        metavar="G",
        help="Without flush: micro-batches per update; by default 1.",
    ),
]


class Figures(NamedTuple):
    """live_versions, staleness: the most, by stage; staleness in updates."""

    weights: str
    updates_every: int
    live_versions: tuple[int, ...]
    staleness: tuple[int, ...]

    def __str__(self) -> str:
        live, stale = (" ".join(map(str, each)) for each in (self.live_versions, self.staleness))
        count = "micro-batch" if self.updates_every == 1 else f"{self.updates_every} micro-batches"
        return (
            f"weights {self.weights}, an update every {count}; by stage: live versions {live}; gradients at most "
            f"{stale} updates old"
        )


def plan_of(schedule: Schedule, weights: str | None, updates_every: int | None) -> Versions | None:
    """The versions that the schedule uses; None for one that flushes. Raises VersionError for what does not fit."""
    if schedule.flush and weights is None and updates_every is None:
        return None
    try:
        return versions(schedule, cast(WeightPolicy, weights or "stash"), updates_every or 1)
    except VersionError as error:
        text = str(error).replace("updates_every =", "--updates-every").replace("weights =", "--weights")
        raise VersionError(text) from None


def figures(schedule: Schedule, plan: Versions) -> Figures:
    ranks, stages = range(schedule.num_ranks), range(schedule.num_stages)
    live = tuple(max(plan.peak(rank, stage) for rank in ranks) for stage in stages)
    return Figures(plan.policy, plan.every, live, tuple(plan.staleness.max(axis=1).tolist()))
