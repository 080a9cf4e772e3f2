"""How long a partition takes, and how far from the best it can be: random layers, over more and more ranks.

    .venv/bin/python bench/partition.py [--json FILE]

Layers take 1 to 2 seconds, send 1 byte and have 5 to 50 bytes of weights; links carry 20 bytes per second. Processor
time, the best of three; a gap of 0 is a proof. "ideal" is the work over the ranks, which no cut beats.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np

from pipeswift.ir import loop, vee
from pipeswift.plan.partition import Layers, Machine, Problem, noam, partition

REPEATS = 3


class Row(NamedTuple):
    """One line of the table."""

    layers: int
    ranks: int
    kind: str
    seconds: float
    over_ideal: float
    gap: float


def straight(layers: Layers, machine: Machine) -> Problem:
    return Problem(layers, machine)


def replicas(layers: Layers, machine: Machine) -> Problem:
    count = noam(len(machine))
    return Problem(layers, machine, replicate=True, in_flight=count, versions=count)


def chunks(place: Callable[[int, int], int], count: int) -> Callable[[Layers, Machine], Problem]:
    def problem(layers: Layers, machine: Machine) -> Problem:
        ranks = len(machine)
        return Problem(layers, machine, rank_of=tuple(place(stage, ranks) for stage in range(ranks * count)))

    return problem


CASES = [
    (26, 4, "one stage per rank", straight),
    (200, 64, "one stage per rank", straight),
    (200, 64, "replicas", replicas),
    (26, 4, "2 chunks, loop", chunks(loop, 2)),
    (26, 4, "2 chunks, V", chunks(vee, 2)),
    (50, 8, "2 chunks, loop", chunks(loop, 2)),
    (50, 8, "2 chunks, V", chunks(vee, 2)),
    (98, 8, "4 chunks, loop", chunks(loop, 4)),
]


def measure(layers: int, ranks: int, kind: str, make: Callable[[Layers, Machine], Problem]) -> Row:
    """One row, in this process."""
    random = np.random.default_rng(0)
    costs = Layers.of(random.uniform(1, 2, layers), output_bytes=1.0, parameter_bytes=random.uniform(5, 50, layers))
    problem = make(costs, Machine.of(ranks, inside=20.0))
    seconds = []
    for _ in range(REPEATS):
        begin = process_time()
        found = partition(problem)
        seconds.append(process_time() - begin)
    return Row(layers, ranks, kind, min(seconds), found.bottleneck * ranks / costs.seconds.sum(), found.gap)


def show(row: Row) -> str:
    """One line of the table."""
    return f"{row.layers:>6} {row.ranks:>6}  {row.kind:<19} {row.seconds:>8.3f} {row.over_ideal:>11.4f} {row.gap:>7.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a partition takes.")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    path = parser.parse_args().json

    print("layers  ranks  kind                 seconds  over ideal     gap")
    rows = []
    for case in CASES:
        row = measure(*case)
        rows.append(row)
        print(show(row), flush=True)
    if path:
        path.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
