"""Many simulated steps, each under another draw of swinging stage times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer

from pipeswift.cli import options
from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.policy import Rule
from pipeswift.policy.diary import tally
from pipeswift.simulate import factors, varied, work_bound
from pipeswift.simulate.variability import MOST
from pipeswift.trace import Trace, makespan

SEEDS = 100


class Shape(StrEnum):
    iid = "iid"
    ar1 = "ar1"
    burst = "burst"


Variability = Annotated[
    float | None,
    typer.Option(
        "--variability",
        parser=options.number(float, 0, MOST),
        metavar="SIGMA",
        help="How much passes swing: log-normal factors of this sigma on the seconds of each stage and micro-batch.",
    ),
]
Pattern = Annotated[
    Shape | None,
    typer.Option(
        "--pattern", help="iid (if not given); ar1: alike from one micro-batch to the next; burst: two slow stages."
    ),
]
Seeds = Annotated[
    int | None,
    options.count("--seeds", "N", f"How many draws, the same for every schedule and policy; {SEEDS} if not given."),
]


class Draws(NamedTuple):
    """Seeds from 0, and one more for calibration."""

    sigma: float
    pattern: Shape
    seeds: int

    def costs(self, schedule: Schedule, nominal: Costs, seed: int) -> Costs:
        stages, microbatches = schedule.num_stages, schedule.num_microbatches
        return varied(nominal, factors(seed, stages, microbatches, self.sigma, self.pattern.value))


def drawn(sigma: float | None, pattern: Shape | None, seeds: int | None) -> Draws | None:
    """What was asked for; None for a single step without swings."""
    if sigma is not None:
        return Draws(sigma, pattern or Shape.iid, seeds or SEEDS)
    for setting, value in (("--pattern", pattern), ("--seeds", seeds)):
        if value is not None:
            raise PipeSwiftError(f"{setting} goes with --variability, which is missing. Add --variability 0.4, say.")
    return None


@dataclass(frozen=True)
class Swings:
    """One entry per seed in each list; seconds. rules: how often each rule of a policy that adapts decided."""

    schedule: str
    pp: int
    microbatches: int
    chunks: int
    policy: str
    variability: float
    pattern: str
    makespans: list[float]
    lower_bounds: list[float]
    rules: dict[str, list[int]]


def simulate(schedule: Schedule, policy: str, draws: Draws, nominal: Costs, clock: Callable[[Costs], Trace]) -> Swings:
    """One step per seed."""
    makespans, bounds, rules = [], [], {rule.name.lower(): [] for rule in Rule}
    for seed in range(draws.seeds):
        costs = draws.costs(schedule, nominal, seed)
        trace = clock(costs)
        makespans.append(makespan(trace))
        bounds.append(work_bound(schedule, costs))
        counts = tally(trace.counters, schedule.num_ranks)
        for rule, found in rules.items():
            found.append(sum(counts.get(rule, ())))
    used = {rule: found for rule, found in rules.items() if any(found)}
    size = schedule.num_ranks, schedule.num_microbatches, schedule.chunks
    return Swings(schedule.name, *size, policy, draws.sigma, draws.pattern.value, makespans, bounds, used)


def rows(swings: Swings) -> Mapping[str, Sequence[float]]:
    """What to show of the seeds: for each name a number per seed."""
    over = [100 * (mine / least - 1) for mine, least in zip(swings.makespans, swings.lower_bounds, strict=True)]
    found = {"makespan, s": swings.makespans, "lower bound, s": swings.lower_bounds, "over the bound, %": over}
    return found | {f"rule {rule}": counts for rule, counts in swings.rules.items()}
