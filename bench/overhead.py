"""What the runtime itself costs: emulated kernels under our pipeline and under torch.distributed.pipelining.

    .venv/bin/python bench/overhead.py [--json FILE] [--steps N]

Both run the same modules (layers whose F, I and W sleep for a set time), alternating, in the same processes. A step
lasts from the first rank's start to the last rank's end. It is compared with the replay of the schedule's own order,
once with nominal durations, and once with the durations clocked inside the kernels of that very step.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import harness
import pipeswift as ps
from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.rehearse.kernels import Clock, Emulated
from pipeswift.simulate import replay
from pipeswift.trace import makespan

WIDTH = 64
PEERS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved-1f1b": ScheduleInterleaved1F1B}


class Row(NamedTuple):
    """One line of the table: a schedule at a shape. seconds: of each F, I and W kernel of a stage."""

    schedule: str
    ranks: int
    microbatches: int
    seconds: float


class Step(NamedTuple):
    """One rank's part of a step. kernels: (stage, op, seconds) in the order they ended."""

    start: float
    end: float
    kernels: list[tuple[int, int, float]]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def run(rank: int, world: int, row: Row, steps: int) -> dict[str, list[Step]]:
    """`steps` steps of each system, alternating, after one of each to warm up."""
    schedule = schedules.build(row.schedule, world, row.microbatches)
    held = [stage for _, stage in schedule.stages_on(rank)]
    clocks: dict[int, Clock] = {stage: [] for stage in range(schedule.num_stages)}
    make = partial(Emulated, WIDTH, F=row.seconds, I=row.seconds, W=row.seconds)
    layers = [partial(make, clock=clocks[stage]) for stage in range(schedule.num_stages)]
    inputs = torch.ones(row.microbatches, WIDTH)

    pipe = ps.Pipeline(layers, loss=loss, schedule=schedule, mesh=ps.init_mesh(pp=world))
    stages = [PipelineStage(layers[s](), s, schedule.num_stages, torch.device("cpu")) for s in held]
    peer = PEERS[row.schedule]
    theirs = peer(stages if len(stages) > 1 else stages[0], row.microbatches, loss_fn=loss)
    their_arguments: list[Any] = [inputs] if 0 in held else []
    their_options = {"target": inputs, "losses": []} if schedule.num_stages - 1 in held else {}

    systems = {
        "ours": lambda: pipe.step(inputs, inputs),
        "torch": lambda: theirs.step(*their_arguments, **their_options),
    }
    results = defaultdict(list)
    for step in range(steps + 1):
        for name, call in systems.items():
            for clock in clocks.values():
                clock.clear()
            dist.barrier()
            start = perf_counter()
            call()
            end = perf_counter()
            kernels = [(stage, k.op, k.end - k.start) for stage, clock in clocks.items() for k in clock]
            if step:
                results[name].append(Step(start, end, kernels))
    pipe.close()
    return dict(results)


def costs_of(row: Row, kernels: list[tuple[int, int, float]], stages: int) -> Costs:
    """The durations inside the kernels, as costs; a kernel's n-th run on a stage was of micro-batch n."""
    nominal = Costs.uniform(stages)
    seconds = np.zeros((4, stages, row.microbatches))
    seen: dict[tuple[int, int], int] = defaultdict(int)
    for stage, op, duration in kernels:
        seconds[op, stage, seen[stage, op]] = duration
        seen[stage, op] += 1
    seconds[Op.B] = seconds[Op.I] + seconds[Op.W]
    return Costs(seconds, nominal.memory, nominal.boundary_bytes)


def ratios(row: Row, by_rank: list[list[Step]]) -> tuple[list[float], list[float]]:
    """(step over nominal replay, step over replay with measured durations), one per step."""
    schedule = schedules.build(row.schedule, row.ranks, row.microbatches)
    n = schedule.num_stages
    ideal = makespan(replay(schedule, Costs.uniform(n, F=row.seconds, I=row.seconds, W=row.seconds)))
    nominal, measured = [], []
    for parts in zip(*by_rank, strict=True):
        step = max(part.end for part in parts) - min(part.start for part in parts)
        kernels = [kernel for part in parts for kernel in part.kernels]
        nominal.append(step / ideal)
        measured.append(step / makespan(replay(schedule, costs_of(row, kernels, n))))
    return nominal, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[10, 20])
    options = parser.parse_args()
    shapes = [(m, ms) for m in options.microbatches for ms in options.milliseconds]
    rows = [Row(name, options.ranks, m, ms / 1e3) for m, ms in shapes for name in PEERS]
    table = []
    for row in rows:
        by_rank = harness.launch(run, row, options.steps, world=row.ranks)
        line: dict[str, Any] = row._asdict()
        for system in ("ours", "torch"):
            nominal, measured = ratios(row, [part[system] for part in by_rank])
            line |= {f"{system} / nominal": median(nominal), f"{system} / measured": median(measured)}
            line[f"{system} spread"] = max(measured) - min(measured)
        table.append(line)
        harness.print_row(line, header=len(table) == 1)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
