"""`pipeswift verify`: whether the schedule in a file may run."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeswift import codec
from pipeswift.cli import options, simulate
from pipeswift.cli import weights as updates
from pipeswift.verify import InvalidSchedule, peak_activations, verify_versions
from pipeswift.verify import verify as violations_of

ReceivePool = Annotated[
    int,
    typer.Option(
        "--receive-pool",
        parser=options.number(int, 0, 1e9),
        metavar="K",
        help="Receive buffers per boundary and direction; with 0, a send waits until its receiver needs the message.",
    ),
]


VersionLimit = Annotated[
    int | None,
    typer.Option(
        "--version-limit",
        parser=options.number(int, 1, 1e9),
        metavar="K",
        help="Without flush: the most versions of one stage's weights that a rank may keep.",
    ),
]
StalenessLimit = Annotated[
    int | None,
    typer.Option(
        "--staleness-limit",
        parser=options.number(int, 0, 1e9),
        metavar="K",
        help="Without flush: the most updates between the weights of a gradient and those it is applied to.",
    ),
]


def verify(
    file: Annotated[str, typer.Argument(help="A schedule, .csv (torch's action text) or .json.", metavar="FILE")],
    receive_pool: ReceivePool = 2,
    memory_limit: options.MemoryLimit = None,
    weights: updates.Weights = None,
    updates_every: updates.UpdatesEvery = None,
    version_limit: VersionLimit = None,
    staleness_limit: StalenessLimit = None,
) -> None:
    """Check that a schedule is complete, in order, free of deadlock and within memory; say all that is wrong."""
    schedule = codec.load(file)
    violations = violations_of(schedule, receive_pool=receive_pool, memory_limit=memory_limit)
    plan = None if violations else updates.plan_of(schedule, weights, updates_every)
    if plan is not None:
        violations = verify_versions(schedule, plan, version_limit=version_limit, staleness_limit=staleness_limit)
    if violations:
        raise InvalidSchedule(schedule.name, violations, shown=len(violations))
    peaks = " ".join(f"{peak:g}" for peak in peak_activations(schedule).tolist())
    print(f"ok: {simulate.title(schedule)}, {schedule.num_actions} actions")
    print(f"    every pass is there once and in order; no deadlock with a receive pool of {receive_pool}")
    print(f"    peak activations per rank: {peaks}" + (f" (limit {memory_limit:g})" if memory_limit else ""))
    if plan is not None:
        print(f"    {updates.figures(schedule, plan)}")
