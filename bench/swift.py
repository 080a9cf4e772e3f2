"""What swinging stage times cost static orders, and what policy swift wins back.

    .venv/bin/python bench/swift.py [--table NAME] [--seeds N] [--sizes 4x16 8x32 16x64] [--tries N] [--json FILE]

Simulated: F = I = 1, W = .8, latency .02, the same number of micro-batches in flight at every stage (the limit, p or
2p), and factors on each (stage, micro-batch) as of `simulate.factors`. Figures are medians over the seeds, and ratios
of medians. Swift's hint is a nominal order, ZB-H1 at p and ZB-H2 at 2p; it is calibrated by one static run on a seed
outside the set.

grid. over 1f1b, over base: speed-ups of swift over static 1F1B and over the baseline, which is the best, under the same
noise, of 1F1B, ZB-H1, ZB-H2 and the order that `search` finds for equal times, as far as they fit. bound: how far swift
is above the busiest rank's head plus work, in percent. closed: its share of what lies between baseline and bound.
robust: the order found by `search` for the mean over draws with this sigma, over the baseline, and under swift as its
hint.

ablation. What swift loses without one of its rules or estimates, in percent, as the mean over sizes and patterns.

reach. At limit p: how far above the bound, in percent, are ZB-H1, swift, and the order that `search` finds for the very
times of each seed, which nobody knows beforehand; as means over seeds that are none of the grid's.

source. Micro-batches whose lengths are known beforehand and alike on all stages, in the given order and in
`policy.source_order`: speed-ups over the hint's static order as given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from math import exp, inf, log
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from pipeswift.cost import Costs
from pipeswift.ir import Schedule
from pipeswift.policy import (
    Calibration,
    Monitor,
    Prices,
    Rules,
    Summary,
    Swift,
    calibrate,
    monitor,
    slots_of,
    source_order,
)
from pipeswift.schedules import build
from pipeswift.search import search
from pipeswift.simulate import PATTERNS, Pattern, factors, replay, run, varied, work_bound
from pipeswift.trace import makespan

SIGMAS = (0.0, 0.2, 0.4, 0.8)
UNSEEN = 1000  # the first seed outside the grid's
F, I, W, LATENCY = 1.0, 1.0, 0.8, 0.02  # noqa: E741
Row = dict[str, Any]


class Case(NamedTuple):
    """One size, memory limit and swing."""

    ranks: int
    microbatches: int
    share: int  # the limit, in micro-batches per rank
    sigma: float
    pattern: Pattern

    @property
    def limit(self) -> int:
        return self.share * self.ranks

    @property
    def slots(self) -> dict[tuple[int, int], int]:
        return {(stage, 0): self.limit for stage in range(self.ranks)}

    @property
    def nominal(self) -> Costs:
        return Costs.uniform(self.ranks, F=F, I=I, W=W, comm=LATENCY)

    @property
    def hint(self) -> Schedule:
        return build(f"zb-h{self.share}", self.ranks, self.microbatches)

    def costs(self, seed: int) -> Costs:
        return varied(self.nominal, factors(seed, self.ranks, self.microbatches, self.sigma, self.pattern))


def cases(sizes: Iterable[tuple[int, int]]) -> list[Case]:
    """The largest first, which take longest. Without swing, all patterns are the same."""
    return [
        Case(p, m, share, sigma, pattern)
        for (p, m), share, sigma in product(sorted(sizes, reverse=True), (1, 2), SIGMAS)
        for pattern in (PATTERNS if sigma else PATTERNS[:1])
    ]


def static(schedule: Schedule, draws: Iterable[Costs]) -> list[float]:
    """The makespan under each of the draws."""
    return [makespan(replay(schedule, costs)) for costs in draws]


def swift(
    case: Case,
    hint: Schedule,
    draws: list[Costs],
    make: Callable[..., Swift] = Swift,
    hearsay: Callable[[Summary, int], float] | None = None,
) -> list[float]:
    """The same under the policy, calibrated on the seed after the draws'."""
    policy = make(hint, case.slots, calibration=calibrate(replay(hint, case.costs(len(draws)))))
    return [makespan(run(hint, costs, policy, case.slots, hearsay)) for costs in draws]


def compare(case: Case, seeds: int, tries: int) -> Row:
    draws = [case.costs(seed) for seed in range(seeds if case.sigma else 1)]
    bounds = [work_bound(case.hint, costs) for costs in draws]
    orders = {"1f1b": build("1f1b", case.ranks, case.microbatches), "zb-h1": build("zb-h1", *case[:2])}
    orders |= {"zb-h2": build("zb-h2", *case[:2])} if case.share == 2 else {}
    orders["searched"] = _searched(*case[:3], 0.0, tries)
    assert all(max(slots_of(order).values()) <= case.limit for order in orders.values())
    medians = {name: median(static(order, draws)) for name, order in orders.items()}
    base = min(medians, key=medians.__getitem__)
    robust = _searched(*case[:4], tries)
    under_swift = swift(case, case.hint, draws)
    ours, bound = median(under_swift), median(bounds)
    return {
        "p": case.ranks,
        "m": case.microbatches,
        "limit": case.limit,
        "pattern": case.pattern,
        "sigma": case.sigma,
        "baseline": base,
        "seconds": ours,
        "over 1f1b": medians["1f1b"] / ours,
        "over base": medians[base] / ours,
        "bound %": 100 * median(mine / least - 1 for mine, least in zip(under_swift, bounds, strict=True)),
        "closed %": 100 * (medians[base] - ours) / (medians[base] - bound) if medians[base] > bound * 1.001 else 0.0,
        "robust": medians[base] / median(static(robust, draws)),
        "robust hint": medians[base] / median(swift(case, robust, draws)),
    }


@cache
def _searched(ranks: int, microbatches: int, share: int, sigma: float, tries: int) -> Schedule:
    costs = Case(ranks, microbatches, share, sigma, "iid").nominal
    limits = {"memory_limit": share * ranks, "work_limit": tries}
    found = search(costs, ranks=ranks, microbatches=microbatches, objective="makespan", variability=sigma, **limits)
    return found.schedule


class Average(Monitor):
    """Expects a pass to last as long as the mean, whatever the F of its micro-batch took."""

    def ended(self, action, seconds):
        super().ended(action, seconds)
        self._forwards.clear()


class Averaging(Swift):
    def monitor(self, rank):
        return Average(rank, self._calibration, self._alarm)


class Indifferent(Swift):
    """Waits as gladly with many slots as with few."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._scarcity, self._holds = [1.0] * len(self._scarcity), True


def never(summary: Summary, listener: int) -> float:
    return inf


def late(summary: Summary, listener: int) -> float:
    return F


def _with(**options: Any) -> Row:
    return {"make": partial(Swift, **options)}


VARIANTS: dict[str, Row] = {
    "all rules": {},
    "no follow": _with(rules=Rules(follow=False)),
    "no advance": _with(rules=Rules(advance=False)),
    "no hold": _with(rules=Rules(hold=False)),
    "neither": _with(rules=Rules(follow=False, hold=False)),
    "no force": _with(rules=Rules(patience=inf)),
    "throttle from 1": _with(rules=Rules(crowd=1)),
    "throttle from 2": _with(rules=Rules(crowd=2)),
    "throttle from 4": _with(rules=Rules(crowd=4)),
    "means only": {"make": Averaging},
    "window of 1": {"window": 1},
    "summaries lost": {"hearsay": never},
    "summaries late": {"hearsay": late},
    "scarcity off": {"make": Indifferent},
    "W as dear as others": _with(prices=Prices(weight=0.0, weight_place=Prices().place)),
    "W without its price": _with(prices=Prices(weight=0.0)),
    "places free": _with(prices=Prices(place=0.0, weight_place=0.0)),
    "no calibration": {"calibrated": False},
}


def without(case: Case, seeds: int) -> dict[str, float]:
    """The median makespan of each variant."""
    draws = [case.costs(seed) for seed in range(seeds if case.sigma else 1)]
    return {name: median(_variant(case, draws, **variant)) for name, variant in VARIANTS.items()}


def _variant(case, draws, make=Swift, hearsay=None, window=None, calibrated=True):
    if not calibrated:
        make = _uncalibrated
    with patch.multiple(monitor, SHORT=window, LONG=window) if window else nullcontext():
        return swift(case, case.hint, draws, make, hearsay)


def _uncalibrated(hint: Schedule, slots: Any, calibration: Calibration) -> Swift:
    return Swift(hint, slots)


def ablation(medians: dict[Case, dict[str, float]]) -> Iterator[Row]:
    """What each variant loses to the first, for each sigma and limit, in percent."""
    groups: dict[str, list[dict[str, float]]] = {}
    for case, found in medians.items():
        groups.setdefault(f"{case.sigma:g}, {'' if case.share == 1 else case.share}p", []).append(found)
    for name in VARIANTS:
        losses = {group: [log(row[name] / row["all rules"]) for row in rows] for group, rows in groups.items()}
        yield {"variant": name} | {group: 100 * (exp(fmean(each)) - 1) for group, each in sorted(losses.items())}


def _in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["p"], row.get("limit"), PATTERNS.index(row["pattern"]), row["sigma"]))


def reach(case: Case, seeds: int, tries: int) -> Row:
    numbers = range(UNSEEN, UNSEEN + seeds)
    draws = [case.costs(seed) for seed in numbers]
    bounds = [work_bound(case.hint, costs) for costs in draws]
    policy = Swift(case.hint, case.slots, calibration=calibrate(replay(case.hint, case.costs(UNSEEN + seeds))))
    limits = {"memory_limit": case.limit, "work_limit": tries}
    size = {"ranks": case.ranks, "microbatches": case.microbatches}
    lines = {
        "zb-h1": static(case.hint, draws),
        "swift": [makespan(run(case.hint, costs, policy, case.slots)) for costs in draws],
        "knowing all": [search(costs, **size, **limits, objective="makespan").value for costs in draws],
    }
    above = {
        name: 100 * fmean(mine / least - 1 for mine, least in zip(found, bounds, strict=True))
        for name, found in lines.items()
    }
    return {"p": case.ranks, "m": case.microbatches, "pattern": case.pattern, "sigma": case.sigma} | above


def source(case: Case, seeds: int) -> Row:
    lengths = [factors(seed, 1, case.microbatches, case.sigma)[0] for seed in range(seeds + 1)]
    sorted_ = [each[list(source_order(each))] for each in lengths]
    found: dict[str, float] = {}
    for name, each in (("given", lengths), ("source order", sorted_)):
        *draws, unseen = (varied(case.nominal, np.tile(row, (case.ranks, 1))) for row in each)
        policy = Swift(case.hint, case.slots, calibration=calibrate(replay(case.hint, unseen)))
        found[f"static, {name}"] = median(static(case.hint, draws))
        found[f"swift, {name}"] = median(makespan(run(case.hint, costs, policy, case.slots)) for costs in draws)
    first = found.pop("static, given")
    return {"p": case.ranks, "m": case.microbatches, "limit": case.limit, "pattern": "iid", "sigma": case.sigma} | {
        name: first / seconds for name, seconds in found.items()
    }


def show(rows: list[Row]) -> None:
    """As a table that a page can take as it is."""
    widths = {name: max(len(name), *(len(_cell(row[name])) for row in rows)) for name in rows[0]}
    print("|", " | ".join(f"{name:>{width}}" for name, width in widths.items()), "|")
    print("|" + "|".join("-" * (width + 1) + ":" for width in widths.values()) + "|")
    for row in rows:
        print("|", " | ".join(f"{_cell(row[name]):>{width}}" for name, width in widths.items()), "|")


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if value in SIGMAS:
        return f"{value:g}"
    return f"{round(value, 3) + 0.0:.3f}" if abs(value) < 10 else f"{value:.1f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=100)
    arguments.add_argument("--sizes", nargs="+", default=["4x16", "8x32", "16x64"], metavar="PxM")
    arguments.add_argument("--tries", type=int, default=2000, help="orders that each search replays on all its draws")
    arguments.add_argument("--table", choices=("grid", "ablation", "reach", "source"), default="grid")
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    wanted = cases([tuple(map(int, size.split("x"))) for size in given.sizes])
    task = {
        "grid": partial(compare, seeds=given.seeds, tries=given.tries),
        "ablation": partial(without, seeds=given.seeds),
        "reach": partial(reach, seeds=given.seeds, tries=given.tries),
        "source": partial(source, seeds=given.seeds),
    }[given.table]
    if given.table == "reach":
        wanted = [case for case in wanted if case.share == 1 and case.sigma]
    if given.table == "source":
        wanted = [case for case in wanted if case.pattern == "iid" and case.sigma]
    with get_context("spawn").Pool(given.processes) as pool:
        found = pool.map(task, wanted, chunksize=1)
    rows = list(ablation(dict(zip(wanted, found, strict=True)))) if given.table == "ablation" else _in_order(found)
    show(rows)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
