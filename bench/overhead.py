"""What the runtime itself costs: emulated kernels under our pipeline and under torch.distributed.pipelining.

    .venv/bin/python bench/overhead.py [--json FILE] [--steps N] [--schedules NAME ...]

Both run layers whose F, I and W sleep for a set time, alternating, in the same processes. A step lasts from the first
rank's start to the last rank's end. It is compared with the replay of the schedule's own order, once with nominal
durations, and once with the durations clocked inside the kernels of that very step. Torch's counterpart of a schedule
is the one of the same name; beside ZB-H1 and ZB-H2, of which it has none, stands its interleaved zero-bubble schedule,
and beside DualPipe its DualPipeV. Pairs run their parts one after the other in both.

The last lines show what an action costs without communication and without autograd.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import harness
import pipeswift as ps
from pipeswift import codec, schedules
from pipeswift.cost import Costs
from pipeswift.ir import Op, Schedule
from pipeswift.rehearse.kernels import Clock, Emulated
from pipeswift.runtime.boundary import Flat
from pipeswift.runtime.stage import Entry, Stage
from pipeswift.simulate import replay
from pipeswift.trace import makespan

WIDTH = 64
PEERS: dict[str, tuple[str, int]] = {  # torch's class, its stages per rank
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
    "zb-h1": ("ScheduleInterleavedZeroBubble", 2),
    "zb-h2": ("ScheduleInterleavedZeroBubble", 2),
    "zb-v": ("ScheduleZBVZeroBubble", 2),
    "dualpipe": ("ScheduleDualPipeV", 2),
    "dualpipe-v": ("ScheduleDualPipeV", 2),
}


IN_A_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Row(NamedTuple):
    """One line of the table: a schedule at a shape. seconds: of each F, I and W kernel of a stage."""

    schedule: str
    ranks: int
    microbatches: int
    seconds: float


class Step(NamedTuple):
    """One rank's part of a step. kernels: (stage, op, micro-batch, seconds)."""

    start: float
    end: float
    kernels: list[tuple[int, int, int, float]]


class System(NamedTuple):
    """A pipeline under test: one step, the order it follows, and its kernels' clocks by stage."""

    step: Callable[[], Any]
    schedule: Schedule
    clocks: dict[int, Clock]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def layers(row: Row, clocks: dict[int, Clock]) -> list[Callable[[], nn.Module]]:
    make = partial(Emulated, WIDTH, F=row.seconds, I=row.seconds, W=row.seconds)
    return [partial(make, clock=clock) for clock in clocks.values()]


def ours(rank: int, row: Row, inputs: Tensor) -> System:
    schedule = schedules.build(row.schedule, row.ranks, row.microbatches)
    clocks: dict[int, Clock] = {stage: [] for stage in range(schedule.num_stages)}
    pipe = ps.Pipeline(layers(row, clocks), loss=loss, schedule=schedule, mesh=ps.init_mesh(pp=row.ranks))
    return System(lambda: pipe.step(inputs, inputs), schedule, clocks)


def torchs(rank: int, row: Row, inputs: Tensor) -> System:
    name, chunks = PEERS[row.schedule]
    stages = row.ranks * chunks
    clocks: dict[int, Clock] = {stage: [] for stage in range(stages)}
    held = [rank] if chunks == 1 else [rank, 2 * row.ranks - 1 - rank if name in IN_A_V else rank + row.ranks]
    build = layers(row, clocks)
    pieces = [PipelineStage(build[s](), s, stages, torch.device("cpu")) for s in held]
    peer = getattr(torch_schedules, name)(pieces if chunks > 1 else pieces[0], row.microbatches, loss_fn=loss)
    arguments: list[Any] = [inputs] if 0 in held else []
    options = {"target": inputs, "losses": []} if stages - 1 in held else {}
    order = _order_of(peer) if chunks > 1 else schedules.build(row.schedule, row.ranks, row.microbatches)
    return System(lambda: peer.step(*arguments, **options), order, clocks)


def _order_of(peer: Any) -> Schedule:
    """The order that a schedule of torch follows; its text form is ours."""
    rows = (peer.pipeline_order[rank] for rank in sorted(peer.pipeline_order))
    return codec.from_csv("\n".join(",".join("" if action is None else str(action) for action in row) for row in rows))


def run(rank: int, world: int, row: Row, steps: int) -> dict[str, tuple[Schedule, list[Step]]]:
    """`steps` steps of each system, alternating, after one of each to warm up."""
    inputs = torch.ones(row.microbatches, WIDTH)
    systems = {"ours": ours(rank, row, inputs), "torch": torchs(rank, row, inputs)}
    results: dict[str, list[Step]] = {name: [] for name in systems}
    for step in range(steps + 1):
        for name, system in systems.items():
            for clock in system.clocks.values():
                clock.clear()
            dist.barrier()
            start = perf_counter()
            system.step()
            end = perf_counter()
            if step:
                results[name].append(Step(start, end, kernels_of(system, rank)))
    return {name: (system.schedule, results[name]) for name, system in systems.items()}


def kernels_of(system: System, rank: int) -> list[tuple[int, int, int, float]]:
    """What this rank's clocks have seen; the n-th run on a stage was of the n-th micro-batch that comes there."""
    schedule, kernels = system.schedule, []
    for stage, clock in system.clocks.items():
        mine = [i for i in range(schedule.num_microbatches) if schedule.rank_of(stage, i) == rank]
        coming = {op: iter(mine) for op in Op}
        kernels += [(stage, k.op, next(coming[Op(k.op)]), k.end - k.start) for k in clock]
    return kernels


def costs_of(schedule: Schedule, kernels: list[tuple[int, int, int, float]]) -> Costs:
    """The durations inside the kernels, as costs."""
    nominal = Costs.uniform(schedule.num_stages)
    seconds = np.zeros((4, schedule.num_stages, schedule.num_microbatches))
    for stage, op, microbatch, duration in kernels:
        seconds[op, stage, microbatch] = duration
    seconds[Op.B] = seconds[Op.I] + seconds[Op.W]
    return Costs(seconds, nominal.memory, nominal.boundary_bytes)


def ratios(seconds: float, schedule: Schedule, by_rank: list[list[Step]]) -> tuple[list[float], list[float]]:
    """(step over nominal replay, step over replay with measured durations), one per step."""
    ideal = makespan(replay(schedule, Costs.uniform(schedule.num_stages, F=seconds, I=seconds, W=seconds)))
    nominal, measured = [], []
    for parts in zip(*by_rank, strict=True):
        step = max(part.end for part in parts) - min(part.start for part in parts)
        kernels = [kernel for part in parts for kernel in part.kernels]
        nominal.append(step / ideal)
        measured.append(step / makespan(replay(schedule, costs_of(schedule, kernels))))
    return nominal, measured


class Idle(Stage):
    """A stage that does nothing, so that only the executor's own work is left."""

    def forward(self, segment: int, entry: Entry, flat: Flat) -> Flat:
        assert self.tail is None or self.tail(entry.microbatch, torch.zeros(())) is not None
        return flat

    def backward(self, segment: int, microbatch: int, gradients: Any) -> tuple[Tensor, ...]:
        return ()


def own_cost(microbatches: int = 64, rounds: int = 50) -> float:
    """Seconds per action in a pipeline of one rank whose stage does nothing, median over rounds."""
    pipe = ps.Pipeline([nn.Identity], loss=loss, schedule="1f1b", microbatches=microbatches)
    for stage in pipe.stages.values():
        stage.__class__ = Idle
    inputs = torch.ones(microbatches, WIDTH)
    times = []
    for _ in range(rounds):
        trace = pipe.step(inputs, inputs).trace
        times.append((trace.end[-1] - trace.start[0]) / len(trace))
    pipe.close()
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[10, 20])
    parser.add_argument("--schedules", nargs="+", default=list(PEERS), choices=list(PEERS))
    options = parser.parse_args()
    shapes = [(m, ms) for m in options.microbatches for ms in options.milliseconds]
    table: list[dict[str, Any]] = []
    for row in [Row(name, options.ranks, m, ms / 1e3) for m, ms in shapes for name in options.schedules]:
        by_rank = harness.launch(run, row, options.steps, world=row.ranks)
        line: dict[str, Any] = {"schedule": row.schedule, "p": row.ranks, "m": row.microbatches, "op, s": row.seconds}
        for system in ("ours", "torch"):
            schedule = by_rank[0][system][0]
            nominal, measured = ratios(row.seconds, schedule, [part[system][1] for part in by_rank])
            line |= {f"{system}/nominal": median(nominal), f"{system}/measured": median(measured)}
            line[f"{system} spread"] = max(measured) - min(measured)
        harness.print_row(line, header=not table)
        table.append(line)
    cost = own_cost()
    print(f"own cost per action, no communication, no autograd: {1e6 * cost:.1f} microseconds")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": table, "own cost": cost}, file, indent=1)


if __name__ == "__main__":
    main()
