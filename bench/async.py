"""Throughput and latency with and without flush: emulated kernels under GPipe, 1F1B and PipeDream.

    .venv/bin/python bench/async.py [--json FILE] [--ranks P] [--milliseconds MS] [--microbatches N] [--rounds K]

Layers whose F, I and W sleep for a set time, one per rank. A round trains N micro-batches: PipeDream in one order, with
an update per micro-batch; GPipe and 1F1B in steps of m with an optimizer step behind each. Rounds alternate between the
rows; figures are medians over rounds. over: throughput over that of the first row.

throughput: micro-batches per second of a whole round, start-up and drain included; *simulated* is that of the replay
with nominal durations, without the optimizer. steady: of PipeDream's middle, from the end of B p to that of B N-p-1 on
rank 0. bound: 1 / (F + I + W of the slowest stage). utilization: share of that middle in which ranks were inside
kernels; *of replay*: over the same of the replay with the durations clocked inside the kernels. latency: from the start
of a micro-batch's F to the end of its B on rank 0, median over micro-batches (PipeDream: the middle).
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

import harness
import pipeswift as ps
from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.rehearse.kernels import Clock, Emulated
from pipeswift.simulate import replay
from pipeswift.trace import Trace, makespan

WIDTH = 64


class Row(NamedTuple):
    """One way to train: a schedule and the micro-batches of one of its steps."""

    schedule: str
    microbatches: int


class Round(NamedTuple):
    """One round on one rank. trace: of all ranks, of its last step. kernels: (stage, op, seconds) in that step."""

    seconds: float
    trace: Trace
    kernels: list[tuple[int, Op, float]]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


class System:
    """A pipeline for one row, and what it takes to train one round."""

    def __init__(self, rank: int, row: Row, options: argparse.Namespace):
        self._steps = options.microbatches // row.microbatches
        self._clocks: dict[int, Clock] = {stage: [] for stage in range(options.ranks)}
        seconds = options.milliseconds / 1e3
        make = partial(Emulated, WIDTH, F=seconds, I=seconds, W=seconds)
        self.pipe = ps.Pipeline(
            [partial(make, clock=clock) for clock in self._clocks.values()],
            loss=loss,
            schedule=row.schedule,
            microbatches=row.microbatches,
            mesh=ps.init_mesh(pp=options.ranks),
        )
        self._flushes = self.pipe.schedule.flush
        optimizer = self.pipe.optimizer if self._flushes else self.pipe.async_optimizer
        self._optimizer: Any = optimizer(torch.optim.SGD, lr=1e-3)
        self._inputs = torch.ones(row.microbatches, WIDTH)

    def round(self) -> Round:
        dist.barrier()
        start = perf_counter()
        for _ in range(self._steps):
            for clock in self._clocks.values():
                clock.clear()
            result = self.pipe.step(self._inputs, self._inputs)
            if self._flushes:
                self._optimizer.step()
        dist.barrier()
        seconds = perf_counter() - start
        kernels = [(stage, k.op, k.end - k.start) for stage, clock in self._clocks.items() for k in clock]
        return Round(seconds, self.pipe.gather_trace(result), kernels)


def run(rank: int, world: int, rows: list[Row], options: argparse.Namespace) -> list[list[Round]]:
    """The rounds of each row, alternating, after a first of each to warm up."""
    systems = [System(rank, row, options) for row in rows]
    rounds: list[list[Round]] = [[] for _ in rows]
    for number in range(options.rounds + 1):
        for system, mine in zip(systems, rounds, strict=True):
            done = system.round()
            if number:
                mine.append(done)
    return rounds


def clocked(stages: int, microbatches: int, kernels: list[tuple[int, Op, float]]) -> Costs:
    """The durations inside the kernels, as costs; a kernel's n-th run on a stage was of micro-batch n."""
    nominal = Costs.uniform(stages)
    seconds = np.zeros((4, stages, microbatches))
    seen: dict[tuple[int, int], int] = defaultdict(int)
    for stage, op, duration in kernels:
        seconds[op, stage, seen[stage, op]] = duration
        seen[stage, op] += 1
    seconds[Op.B] = seconds[Op.I] + seconds[Op.W]
    return Costs(seconds, nominal.memory, nominal.boundary_bytes)


def ends_of_backward(trace: Trace) -> np.ndarray:
    return trace.end[(trace.stage == 0) & (trace.op == Op.B)]


def latencies(trace: Trace) -> np.ndarray:
    return ends_of_backward(trace) - trace.start[(trace.stage == 0) & (trace.op == Op.F)]


def steady(trace: Trace, costs: Costs, middle: slice) -> tuple[float, float]:
    """(micro-batches per second, utilization) between the first and the last B of `middle` on rank 0."""
    ends = ends_of_backward(trace)[middle]
    busy = 0.0
    for stage, op, microbatch, start, end in zip(
        trace.stage, trace.op, trace.microbatch, trace.start, trace.end, strict=True
    ):
        inside = max(0.0, min(end, ends[-1]) - max(start, ends[0])) / (end - start)
        busy += inside * costs.seconds[op, stage, microbatch]
    length = float(ends[-1] - ends[0])
    return (len(ends) - 1) / length, busy / length / trace.num_ranks


def figures(row: Row, by_rank: list[list[Round]], options: argparse.Namespace) -> dict[str, Any]:
    p, n, seconds = options.ranks, options.microbatches, options.milliseconds / 1e3
    schedule = schedules.build(row.schedule, p, row.microbatches)
    ideal = replay(schedule, Costs.uniform(p, F=seconds, I=seconds, W=seconds))
    rounds = [max(part.seconds for part in parts) for parts in zip(*by_rank, strict=True)]
    middle = slice(p, n - p) if row.microbatches == n else slice(None)
    line: dict[str, Any] = {
        "schedule": row.schedule,
        "m": row.microbatches,
        "throughput": n / median(rounds),
        "simulated": row.microbatches / makespan(ideal),
        "bound": 1 / (3 * seconds),
        "latency, s": median(float(np.median(latencies(part.trace)[middle])) for part in by_rank[0]),
        "simulated, s": float(np.median(latencies(ideal)[middle])),
        "steady": "-",
        "utilization": "-",
        "of replay": "-",
    }
    if row.microbatches == n:
        measured, ratios = [], []
        for parts in zip(*by_rank, strict=True):
            costs = clocked(p, n, [kernel for part in parts for kernel in part.kernels])
            measured.append(steady(parts[0].trace, costs, middle))
            ratios.append(measured[-1][1] / steady(replay(schedule, costs), costs, middle)[1])
        line |= {"steady": median(rate for rate, _ in measured), "utilization": median(use for _, use in measured)}
        line |= {"of replay": median(ratios)}
    line["spread"] = (max(rounds) - min(rounds)) / median(rounds)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=30)
    parser.add_argument("--microbatches", type=int, default=48, help="of a round; a multiple of 8")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = [Row("gpipe", 4), Row("gpipe", 8), Row("1f1b", 8), Row("pipedream", options.microbatches)]
    by_rank = harness.launch(run, rows, options, world=options.ranks)
    table = [figures(row, [part[at] for part in by_rank], options) for at, row in enumerate(rows)]
    for line in table:
        line["over"] = line["throughput"] / table[0]["throughput"]
    for number, line in enumerate(table):
        harness.print_row(line, header=not number)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
