"""What weaving a forward into a backward hides: pairs of emulated MoE blocks in the runtime itself.

    .venv/bin/python bench/weave.py [--table NAME] [--repeat N] [--json FILE]

Four ranks, pp = 2 x ep = 2, two blocks a stage. Blocks sleep for their modelled time. An all-to-all waits for its peer
first; then it sleeps (emulated), or sends real bytes over a network that is held to a rate, whose line is measured
beforehand (shaped; see shaped_link.py, needs root). ratio: of a pair's all-to-alls to its compute.

Two pipelines take turns, one with pairs, one with the same passes in the same order, one after the other. The first two
steps, in which pairs are woven on nominal costs, do not count. Medians over steps; of pairs, over ranks too.

apart, woven: ms of a step. gain: apart / woven, and simulated. spread %: half the range of the woven steps. step: the
simulated time of a woven step, in which a pair takes what its merged program takes, over woven. pair: ms from its first
span to its last. reached: the merged program's simulated time over that. hidden: the share of a pair's all-to-alls in
which its rank computed, from the lanes' spans; ideal: the same of the simulated program.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeswift as ps
from harness import launch, print_row
from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Action, B, F, Op, Order, Overlap, Schedule
from pipeswift.program import (
    BlockCosts,
    Form,
    Grain,
    Lane,
    Line,
    Part,
    Program,
    Span,
    Timeline,
    Work,
    chunk,
    compile_action,
    merge,
    simulate,
)
from pipeswift.rehearse.kernels import Emulated, sleep_until
from pipeswift.runtime.exchange import Divided
from pipeswift.runtime.lanes import Lanes
from pipeswift.simulate import replay
from pipeswift.trace import Trace, makespan
from shaped_link import ShapedLink, exchange, posted

Row = dict[str, Any]
Send = Callable[[float, Any], None]  # does an all-to-all of so many bytes, with the group's handle

SCHEDULES = ("dualpipe-v", "1f1b-overlap")
RATIOS = (0.7, 1.0)
ATTENTION, EXPERTS, START = 0.02, 0.04, 0.001  # seconds of F, I and W each, and of starting a chunk of experts
LOCAL = 0.5  # the share of rows whose expert is on their own rank
WIDTH, BLOCKS, MICROBATCHES = 8, 2, 8
PP, EP, MBIT = 2, 2, 100


class Experts(nn.Module):
    """Emulated experts of an MoE layer, spread over ranks; rows come back as they were."""

    divisible = True

    def __init__(self, costs: BlockCosts, send: Send):
        super().__init__()
        self._costs, self._send = costs, send

    def settle(self, rank: int, ranks: int) -> None: ...

    def report(self, auxiliary: Any, name: str) -> None: ...

    def divide(self, name: str, group: Any, grain: Grain) -> Divided:
        return Divided(Ends(), Sleeping(self._costs, self._send, group.handle), Ends())


class Ends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


class Sleeping:
    """An exchange that takes its time."""

    form, most = Form.MOE, 1

    def __init__(self, costs: BlockCosts, send: Send, handle: Any):
        self._costs, self._send, self._handle = costs, send, handle
        self._values: dict[int, Any] = {}

    def enter(self, op: Op, microbatch: int, value: Any) -> None:
        self._values[microbatch] = value

    def leave(self, op: Op, microbatch: int) -> Any:
        return self._values.pop(microbatch)

    def run(self, work: Work, microbatch: int) -> None:
        if work.lane is Lane.COMPUTE:
            sleep_until(perf_counter() + self._costs(work))
        else:
            self._send(self._costs.counts if work.part is Part.COUNTS else self._costs.sent / work.chunks, self._handle)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def regroup(self, grain: Grain) -> None: ...

    def measure(self, lanes: Lanes) -> BlockCosts:
        return self._costs


def emulated(line: Line, size: float, handle: Any) -> None:
    """Waits for the peer, then sleeps."""
    real(16.0, handle)
    sleep_until(perf_counter() + line(size))


def real(size: float, handle: Any) -> None:
    sent = torch.zeros(EP, max(round(size / 4 / (EP - 1)), 1))
    posted(torch.empty_like(sent), sent, handle)


def costs_of(ratio: float, line: Line) -> BlockCosts:
    """A pair has three times a block's F in compute, and four all-to-alls."""
    seconds = ratio * 3 * (ATTENTION + EXPERTS) / 4
    experts = {op: Line(START, EXPERTS) for op in Op}
    others = {(Part.ATTENTION, op): ATTENTION * (2 if op is Op.B else 1) for op in Op}
    return BlockCosts(line, (seconds - line.fixed) / line.each, experts, LOCAL, 64.0, others)


def program_of(action: Action) -> Program:
    return chunk(compile_action(action, layout=(Form.MOE,) * BLOCKS, takes=True, sends=True), 1, local_first=True)


def pair_of(costs: BlockCosts) -> Timeline:
    """A pair's merged program, simulated."""
    return simulate(merge(program_of(F(0, 0)), program_of(B(0, 1)), costs), costs)


def parted(schedule: Schedule) -> Schedule:
    """The same passes in the same order, the parts of a pair one after the other."""
    return replace(schedule, orders=tuple(Order.of(order.actions()) for order in schedule.orders))


def predicted(schedule: Schedule, costs: BlockCosts) -> float:
    """Simulated seconds of a step."""
    seconds = [simulate(program_of(Action(0, op, 0)), costs).elapsed for op in Op]
    uniform = Costs.uniform(schedule.num_stages)
    uniform.seconds[:] = np.array(seconds)[:, None, None]
    return makespan(replay(schedule, replace(uniform, overlap=pair_of(costs).elapsed)))


# What runs on a rank.


def bench(rank: int, world: int, repeat: int, shaped: bool) -> list[Row]:
    """All ranks get the same rows."""
    mesh = ps.init_mesh(pp=PP, ep=EP)
    line, send = Line(0.001, 1e-9), None
    if shaped:
        line = Line.fit(exchange([64, 1 << 17, 1 << 19, 1 << 20], repeat=5, group=mesh["ep"].get_group()))
        send = real
    if shaped and not rank:
        print(f"held to {MBIT} Mbit/s: found {1e3 * line.fixed:.2f} ms and {8e-6 / line.each:.0f} Mbit/s", flush=True)
    rows = []
    for name in SCHEDULES:
        for ratio in RATIOS:
            rows.append(
                compare(rank, mesh, name, ratio, costs_of(ratio, line), send or partial(emulated, line), repeat)
            )
            if not rank:
                print_row(rows[-1], header=len(rows) == 1)
    return rows


def compare(rank: int, mesh: Any, name: str, ratio: float, costs: BlockCosts, send: Send, repeat: int) -> Row:
    schedule = schedules.build(name, PP, MICROBATCHES, None)
    pipes = [pipeline(made, costs, send, mesh) for made in (parted(schedule), schedule)]
    elapsed: list[list[float]] = [[], []]
    pairs: list[Timeline] = []
    for step in range(2 + repeat):
        for number, pipe in enumerate(pipes):
            dist.barrier()
            start = perf_counter()
            result = pipe.step(torch.ones(MICROBATCHES, WIDTH), torch.ones(MICROBATCHES, WIDTH))
            seconds = torch.tensor([perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if step >= 2:
                elapsed[number].append(seconds.item())
                pairs += pairs_in(result.trace, schedule, rank // EP) if number else ()
    for pipe in pipes:
        pipe.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(pair.elapsed, pair.hidden) for pair in pairs])
    took, hidden = (median(column) for column in zip(*(pair for mine in everyone for pair in mine), strict=True))
    apart, woven = map(median, elapsed)
    ideal = pair_of(costs)
    return {
        "schedule": name,
        "ratio": ratio,
        "apart": 1e3 * apart,
        "woven": 1e3 * woven,
        "gain": apart / woven,
        "simulated": predicted(parted(schedule), costs) / predicted(schedule, costs),
        "spread %": 50 * (max(elapsed[1]) - min(elapsed[1])) / woven,
        "step": predicted(schedule, costs) / woven,
        "pair": 1e3 * took,
        "reached": ideal.elapsed / took,
        "hidden": hidden,
        "ideal": ideal.hidden,
    }


def pipeline(schedule: Schedule, costs: BlockCosts, send: Send, mesh: Any) -> ps.Pipeline:
    def block() -> nn.Module:
        return nn.Sequential(Emulated(WIDTH, F=ATTENTION, I=ATTENTION, W=ATTENTION), Experts(costs, send))

    layers = [block for _ in range(BLOCKS * schedule.num_stages)]
    return ps.Pipeline(
        layers,
        loss=lambda output, target: (output * target).mean(),
        schedule=schedule,
        mesh=mesh,
        expert_chunks=1,
        watchdog=None,  # it would look for the other ranks by their host's name, outside of the network's namespaces
    )


def pairs_in(trace: Trace, schedule: Schedule, rank: int) -> Iterator[Timeline]:
    """The pairs of one rank's trace, of works that have their lane right and nothing else."""
    parts = {Lane.COMPUTE: Part.LAYERS, Lane.ALL_TO_ALL: Part.DISPATCH}
    spans: dict[Action, list[Span]] = {}
    columns: Iterable[Sequence[Any]] = zip(
        *(getattr(trace, name).tolist() for name in ("stage", "op", "microbatch", "lane", "start", "end")), strict=True
    )
    for stage, op, microbatch, lane, start, end in columns:
        action = Action(stage, Op(op), microbatch)
        spans.setdefault(action, []).append(Span(Work(action, parts[Lane(lane)], 0, Op(op)), start, end))
    for entry in schedule.orders[rank]:
        if isinstance(entry, Overlap):
            yield Timeline((*spans[entry.first], *spans[entry.second]))


def main() -> None:
    parser = argparse.ArgumentParser(description="What weaving a forward into a backward hides.")
    parser.add_argument("--table", choices=("emulated", "shaped"), help="only this one")
    parser.add_argument("--repeat", type=int, default=3, help="steps that count")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    results: dict[str, list[Row]] = {}
    if arguments.table in (None, "emulated"):
        print("emulated")
        results["emulated"] = launch(bench, arguments.repeat, False, world=PP * EP)[0]
    if arguments.table in (None, "shaped"):
        print("\nshaped")
        with ShapedLink(PP * EP, MBIT) as link:
            results["shaped"] = launch(bench, arguments.repeat, True, world=PP * EP, network=link)[0]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
