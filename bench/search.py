"""How good the searched schedules are: against the published ones, and against what no schedule can beat.

    .venv/bin/python bench/search.py [--time-limit SECONDS] [--table NAME] [--json FILE]

bytes: Qi et al. 2024, tables 5 and 9, at memory limits of p and of 2p micro-batches, in bytes, where I frees all but
what W needs; beside the paper's searched schedules and its handcrafted ones. counts: the same, a micro-batch counting
1 from the start of F to the end of W. proofs: problems whose optimum is proved. large: many ranks and micro-batches.
uneven: a last stage 1.4 times as heavy. chunks: two stages per rank, beside the best published schedule that fits.
robust: orders searched for the mean over draws, beside those searched for equal times, both on draws that neither saw.

Rates are bubble rates by span; `gap` is how far above the best a schedule can be. Seconds are elapsed, with the
compiled loops in Numba's cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Placement, Schedule, loop, vee
from pipeswift.search import Found, search
from pipeswift.simulate import replay
from pipeswift.trace import bubble_rate, longest_span, peak_memory

Search = Callable[..., Found]
Row = dict[str, Any]


class Published(NamedTuple):
    """One row of the paper's tables 9 (milliseconds) and 5 (bubble rates by span); 8 ranks."""

    model: str
    microbatches: int
    F: float
    I: float  # noqa: E741
    W: float
    comm: float
    zb_1p: float
    zb_2p: float

    @property
    def held(self) -> int:
        """M_B = sb(34h + 5as), what F adds, in bytes."""
        return {"1.5B": 1024 * 6 * (34 * 2304 + 5 * 24 * 1024), "6.2B": 1024 * 3 * (34 * 4096 + 5 * 32 * 1024)}[
            self.model
        ]

    @property
    def kept(self) -> int:
        """M_W = 32sbh, what stays until W."""
        return {"1.5B": 32 * 1024 * 6 * 2304, "6.2B": 32 * 1024 * 3 * 4096}[self.model]


RANKS = 8
PUBLISHED = (
    Published("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    Published("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    Published("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    Published("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    Published("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    Published("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
)


def tables(find: Search) -> dict[str, Callable[[], Iterator[Row]]]:
    every = (in_bytes, in_counts, proofs, large, uneven, chunks, robust)
    return {table.__name__.removeprefix("in_"): partial(table, find) for table in every}


def in_bytes(find: Search) -> Iterator[Row]:
    for row, share in product(PUBLISHED, (1, 2)):
        yield _beside(find, row, share, (row.held, row.kept - row.held, -row.kept), unit=row.held)


def in_counts(find: Search) -> Iterator[Row]:
    for row, share in product(PUBLISHED, (1, 2)):
        yield _beside(find, row, share, (1, 0, -1), unit=1)


def _beside(find: Search, row: Published, share: int, memory: tuple[float, float, float], unit: float) -> Row:
    costs = Costs.uniform(RANKS, F=row.F, I=row.I, W=row.W, comm=row.comm).with_memory(*memory)
    handmade = schedules.build(f"zb-h{share}", RANKS, row.microbatches)
    found = find(costs, ranks=RANKS, microbatches=row.microbatches, memory_limit=share * RANKS * unit)
    searched = row.zb_1p if share == 1 else row.zb_2p
    return {
        "model": row.model,
        "m": row.microbatches,
        "limit": f"{share if share > 1 else ''}p",
        **({"ZB-1p or 2p": searched} if unit != 1 else {}),
        "ZB-H1 or H2": _rate(handmade, costs),
        **_facts(found, costs),
    }


def proofs(find: Search) -> Iterator[Row]:
    for (p, m), share, objective in product(((4, 12), (8, 16)), (1, 2), ("span", "makespan")):
        costs = Costs.uniform(p, F=10, I=11, W=8, comm=1)
        found = find(costs, ranks=p, microbatches=m, memory_limit=share * p, objective=objective)
        yield {"p": p, "m": m, "limit": share * p, "objective": objective, **_facts(found, costs)}
    for p, m, times, limit in (
        (4, 12, (5, 6, 4, 0), 10),
        (4, 12, (5478, 5806, 3534, 200), 32),
        (32, 16, (1, 1, 1, 0), 64),
    ):
        F, I, W, comm = times  # noqa: E741
        costs = Costs.uniform(p, F=F, I=I, W=W, comm=comm).with_memory(2, -1, -1)
        found = find(costs, ranks=p, microbatches=m, memory_limit=limit)
        yield {"p": p, "m": m, "limit": limit, "objective": "span", **_facts(found, costs)}


def large(find: Search) -> Iterator[Row]:
    held, kept = 378880, 163840
    for p, m in ((16, 128), (32, 256), (64, 512)):
        counts = Costs.uniform(p, F=11.3, I=11.25, W=8.1, comm=0.378)
        for unit, costs, limit in (
            ("counts", counts, p),
            ("bytes", counts.with_memory(held, kept - held, -kept), 2 * p * held),
        ):
            found = find(costs, ranks=p, microbatches=m, memory_limit=limit)
            yield {"p": p, "m": m, "memory": unit, "limit": limit, **_facts(found, costs)}


def uneven(find: Search) -> Iterator[Row]:
    costs = Costs.uniform(RANKS, F=11.3, I=11.25, W=8.1, comm=0.378)
    heavier = np.where(np.arange(RANKS) == RANKS - 1, 1.4, 1.0)
    costs = replace(costs, seconds=costs.seconds * heavier[:, None])
    for limit in (RANKS, 2 * RANKS):
        found = find(costs, ranks=RANKS, microbatches=32, memory_limit=limit)
        yield {"limit": limit, "best published": _best_published(costs, 32, limit, 1, loop), **_facts(found, costs)}


def chunks(find: Search) -> Iterator[Row]:
    costs = Costs.uniform(2 * RANKS, F=11.3, I=11.25, W=8.1, comm=0.378, chunks=2)
    for placement, limit in product((vee, loop), (4, 5, 8, 16)):
        found = find(costs, ranks=RANKS, microbatches=24, chunks=2, placement=placement, memory_limit=limit)
        best = _best_published(costs, 24, limit, 2, placement)
        yield {"placement": placement.__name__, "limit": limit, "best published": best, **_facts(found, costs)}


def _best_published(costs: Costs, m: int, limit: float, chunks: int, placement: Placement) -> float:
    """The least longest span of a schedule on the list that has the placement and keeps the limit."""
    spans = []
    for entry in schedules.entries():
        if entry.any_chunks or entry.chunks == chunks:
            schedule = schedules.build(entry.name, RANKS, m, chunks)
            trace = replay(schedule, costs)
            placed = schedule.routes[0] == tuple(placement(stage, RANKS) for stage in range(costs.num_stages))
            if placed and peak_memory(trace, costs.memory).max() <= limit + 1e-9:
                spans.append(longest_span(trace))
    return min(spans, default=float("nan"))


def robust(find: Search, draws: int = 100) -> Iterator[Row]:
    random = np.random.default_rng(12345)
    p, m = 8, 32
    costs = Costs.uniform(p, F=1, I=1, W=0.8, comm=0.02)
    for sigma, limit in product((0.2, 0.4), (p, 2 * p)):
        factors = random.lognormal(-(sigma**2) / 2, sigma, (draws, p, m))
        seen = [replace(costs, seconds=np.broadcast_to(costs.seconds, (4, p, m)) * factor) for factor in factors]
        blind = find(costs, ranks=p, microbatches=m, memory_limit=limit)
        seeing = find(costs, ranks=p, microbatches=m, memory_limit=limit, variability=sigma)
        means = {
            name: float(np.mean([longest_span(replay(schedule, each)) for each in seen]))
            for name, schedule in (
                (f"zb-h{limit // p}", schedules.build(f"zb-h{limit // p}", p, m)),
                ("for equal times", blind.schedule),
                ("for the mean", seeing.schedule),
            )
        }
        yield {"sigma": sigma, "limit": limit, "ZB-H1 or H2": means.pop(f"zb-h{limit // p}"), **means}


def _rate(schedule: Schedule, costs: Costs) -> float:
    return bubble_rate(replay(schedule, costs), by="span")


def _facts(found: Found, costs: Costs) -> Row:
    return {
        "value": found.value,
        "rate": _rate(found.schedule, costs),
        "bound": found.lower_bound,
        "gap %": 100 * found.gap,
        "optimal": found.optimal,
        "method": found.method,
        "seconds": found.seconds,
    }


def show(row: Row, header: bool) -> None:
    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)

    widths = [max(len(name), 9) for name in row]
    if header:
        print("  ".join(name.rjust(width) for name, width in zip(row, widths, strict=True)))
    print("  ".join(cell(value).rjust(width) for value, width in zip(row.values(), widths, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="How good the searched schedules are.")
    parser.add_argument("--time-limit", type=float, default=8.0, help="seconds per search")
    parser.add_argument("--table", help="only this one")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()

    search(Costs.uniform(2, F=1.5), ranks=2, microbatches=3, memory_limit=2, time_limit=1)  # fills Numba's cache
    results = {}
    for name, table in tables(partial(search, time_limit=arguments.time_limit)).items():
        if arguments.table in (None, name):
            print(f"\n{name}")
            results[name] = []
            for row in table():
                show(row, header=not results[name])
                results[name].append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
