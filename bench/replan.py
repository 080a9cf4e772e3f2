"""What policy replan wins where stages get slower and faster from step to step, beside swift, and what a plan costs.

    .venv/bin/python bench/replan.py [--table NAME] [--steps N] [--json FILE]

drift. Simulated: F = I = 1, W = .8. From step to step the seconds of each stage (drift "stages"), or of each of its ops
("ops"), wander by factors: log-normal, mean 1, sigma .3, correlated by .9 from one step to the next. swing: sigma of
further factors on each (stage, micro-batch) of a step. limit: micro-batches in flight, "own" for as many as the hint's
order has. swift, replan: how much less time all steps take than in the hint's order, in percent; replan knows of a step
what `runtime.replanning` does, the means of those before, and the latency. knowing: the same, had it known each step's
means beforehand. once: a single plan, for stages without drift. plans: how many, for each step.

cost. CPU seconds of one plan, the median over as many draws of stages' seconds as there are steps: where the
hint's order turns out to be within 1 % of what none can beat (proved, and how often that is), and where a search has to
follow. share: the latter's of a step in which F = I = 10 ms, W = 8 ms.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from harness import print_row
from pipeswift.cost import Costs
from pipeswift.ir import Schedule
from pipeswift.policy import Follow, Plan, Seen, Swift, calibrate, slots_of
from pipeswift.schedules import build
from pipeswift.search import load, replan, replanned
from pipeswift.simulate import factors, replay, run, varied
from pipeswift.trace import makespan

F, I, W = 1.0, 1.0, 0.8  # noqa: E741
SIGMA, CORRELATION = 0.3, 0.9
UNIT = 0.01  # seconds of an F, for the share of a step
SIZES = ((4, 16), (8, 32))
WEATHERS = (("stages", 0.02, 0.0), ("stages", 0.02, 0.2), ("ops", 0.02, 0.0), ("stages", 0.3, 0.0))
HINTS = (("1f1b", 0), ("1f1b", 2), ("zb-h1", 0), ("zb-h1", 2), ("interleaved-1f1b", 0), ("v-min", 1))
Row = dict[str, Any]


class Case(NamedTuple):
    """A hint, and how times change. share: the limit over p; 0 for the hint's own."""

    name: str
    share: int
    ranks: int
    microbatches: int
    drift: str = "stages"
    latency: float = 0.02
    swing: float = 0.0

    @property
    def hint(self) -> Schedule:
        return build(self.name, self.ranks, self.microbatches)

    @property
    def limit(self) -> int | None:
        return self.share * self.ranks or None

    def steps(self, number: int) -> Iterator[Costs]:
        hint, random = self.hint, np.random.default_rng(0)
        nominal = Costs.uniform(hint.num_stages, F=F, I=I, W=W, chunks=hint.chunks, comm=self.latency)
        shape = (3 if self.drift == "ops" else 1, hint.num_stages)
        at = random.standard_normal(shape)
        for seed in range(number):
            found = varied(nominal, factors(seed, hint.num_stages, self.microbatches, self.swing))
            seconds = found.seconds[:3] * np.exp(SIGMA * at - SIGMA**2 / 2)[..., None]
            yield replace(found, seconds=np.concatenate([seconds, seconds[1:2] + seconds[2:]]))
            at = CORRELATION * at + math.sqrt(1 - CORRELATION**2) * random.standard_normal(shape)


def drift(case: Case, steps: int) -> Row:
    hint, totals = case.hint, dict.fromkeys(("static", "swift", "once", "replan", "knowing"), 0.0)
    own = slots_of(hint)
    slots = own if case.limit is None else dict.fromkeys(own, case.limit)
    plan = Plan(hint)
    swift: Swift | None = None
    nominal = Costs.uniform(hint.num_stages, F=F, I=I, W=W, chunks=hint.chunks, comm=case.latency)

    def find(seconds: np.ndarray, current: Schedule = hint) -> Schedule:
        return replanned(hint, replace(nominal, seconds=seconds[..., None]), case.limit, current)

    once = find(nominal.seconds[..., 0])
    for costs in case.steps(steps):
        seconds = costs.seconds.mean(axis=2)
        for name, order in (("static", hint), ("once", once), ("replan", plan.order), ("knowing", find(seconds))):
            totals[name] += makespan(replay(order, costs))
        totals["swift"] += makespan(run(hint, costs, swift or Follow(hint), slots))
        swift = swift or Swift(hint, slots, calibration=calibrate(replay(hint, costs)))
        plan = plan.after(Seen(seconds, {}), partial(find, current=plan.order))
    won = {name: 100 * (1 - total / totals["static"]) for name, total in totals.items() if name != "static"}
    weather = {"drift": case.drift, "latency": case.latency, "swing": case.swing}
    return _row(case) | weather | won | {"plans": plan.made / steps}


def cost(case: Case, steps: int) -> Row:
    took: dict[bool, list[float]] = {False: [], True: []}
    hint, step = case.hint, []
    for costs in case.steps(steps):
        with patch.object(replan, "search", wraps=replan.search) as searched:
            began = process_time()
            replanned(hint, costs, case.limit)
            took[searched.called].append(process_time() - began)
        step.append(UNIT * makespan(replay(hint, costs)))
    proved, found = (1e3 * median(each) if each else math.nan for each in took.values())
    often = len(took[False]) / steps
    return _row(case) | {"proved": often, "proved ms": proved, "found ms": found, "share %": found / 10 / median(step)}


def _row(case: Case) -> Row:
    limit = case.limit or "own"
    return {"hint": case.name, "p": case.ranks, "m": case.microbatches, "limit": limit}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--table", choices=("drift", "cost"), default="drift")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    load()
    rows = []
    for (name, share), size in product(HINTS, SIZES):
        for weather in WEATHERS[:1] if given.table == "cost" else WEATHERS:
            case = Case(name, share, *size, *weather)
            rows.append(cost(case, given.steps) if given.table == "cost" else drift(case, given.steps))
            print_row(rows[-1], header=len(rows) == 1)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
