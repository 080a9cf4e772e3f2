"""What it costs that the ranks of an expert group agree on each pass as they go.

    .venv/bin/python bench/agreement.py [--json FILE] [--seeds N] [--milliseconds MS] [--sigma S ...]

Emulated kernels in front of real experts, which two replicas share out, in real processes. Each (member, stage,
micro-batch) has a seeded factor for its F, I and W. Swift decides over the groups; then the same passes run in the very
order that it chose, as a schedule that all follow, so that nobody waits for anybody's word. `led %` is how much longer
the step with agreement was than a replay of its order with the times that its passes took, without any time in between;
`followed %` the same of the static one: agreement is the difference. `cost %` is how much longer the step took than the
static one, medians over seeds, and the columns beside it the least and the most: besides agreement, that has what
Swift itself takes, and what both take from kernels on cores that ranks share. `hint`
is the hint's own order. `messages` are those of the leader and of the follower, per pass.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import harness
import pipeswift as ps
from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Action, Op, Order, Schedule
from pipeswift.moe import MoE
from pipeswift.policy import Calibration, Swift, calibrate
from pipeswift.rehearse.kernels import Emulated, sleep_until
from pipeswift.runtime.parley import AGREEMENTS
from pipeswift.simulate import factors, measured_costs, replay, varied
from pipeswift.trace import Trace, makespan, whole_passes

WIDTH, TOKENS, MEMBERS = 16, 8, 2


class Shape(NamedTuple):
    """seconds: of F, of I and of W on average. limit: micro-batches in flight on each stage."""

    ranks: int
    microbatches: int
    seconds: float
    limit: int
    sigma: float

    def factors(self, seed: int, member: int) -> np.ndarray:
        return factors(MEMBERS * seed + member, self.ranks, self.microbatches, self.sigma, "iid")

    def calibration(self, hint: Schedule) -> Calibration:
        nominal = Costs.uniform(self.ranks, F=self.seconds, I=self.seconds, W=self.seconds)
        return calibrate(replay(hint, varied(nominal, self.factors(10_000, 0))))


class Swinging(Emulated):
    """Its n-th F, I and W of a step take `factors[n]` times as long as usual; set `factors` before each step."""

    def __init__(self, seconds: float):
        super().__init__(WIDTH, F=seconds, I=seconds, W=seconds)
        self.factors: Sequence[float] = ()
        self._runs: Counter[Op] = Counter()

    def begin(self, factors: Sequence[float]) -> None:
        self.factors = factors
        self._runs.clear()

    def spend(self, op: Op, start: float) -> None:
        sleep_until(start + self.seconds[op] * self.factors[self._runs[op]])
        self._runs[op] += 1


def block(seconds: float) -> nn.Sequential:
    return nn.Sequential(Swinging(seconds), MoE(WIDTH, experts=2 * MEMBERS, hidden=WIDTH, top_k=1, norm=nn.Identity()))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def measure(rank: int, world: int, hint: Schedule, shape: Shape, seeds: int) -> list[dict[str, float]]:
    """For each seed, the step's seconds with the hint's order, with Swift, and with the order that it chose."""
    mesh = ps.init_mesh(pp=shape.ranks, ep=MEMBERS)
    calibration = shape.calibration(hint)
    slots = {(stage, 0): shape.limit for stage in range(shape.ranks)}
    adaptive = {"policy": lambda schedule: Swift(schedule, slots, calibration=calibration), "in_flight": shape.limit}

    def pipeline(schedule: Schedule, **settings: Any) -> ps.Pipeline:
        layers = [partial(block, shape.seconds)] * shape.ranks
        pipe = ps.Pipeline(layers, loss=loss, schedule=schedule, mesh=mesh, expert_chunks=1, **settings)
        step(pipe, 0)  # warms up
        return pipe

    def step(pipe: ps.Pipeline, seed: int) -> Trace:
        for stage in pipe.stages.values():
            for layer in stage.layers():
                for part in layer.modules():
                    if isinstance(part, Swinging):
                        part.begin(shape.factors(seed, rank % MEMBERS)[stage.index].tolist())
        inputs = torch.ones(shape.microbatches, TOKENS, WIDTH)
        dist.barrier()
        return pipe.gather_trace(pipe.step(inputs, inputs))

    found = []
    static, swift = pipeline(hint), pipeline(hint, **adaptive)
    for seed in range(seeds):
        led = step(swift, seed)
        chosen = replace(hint, name=f"as led {seed}", orders=orders(led))
        follower = pipeline(chosen)
        followed = step(follower, seed)
        follower.close()
        told = [int(counter.value[-1]) for counter in led.counters if counter.name == AGREEMENTS]
        times = {"hint": makespan(step(static, seed)), "swift": makespan(led), "replay": makespan(followed)}
        waits = {"led": between(chosen, led), "followed": between(chosen, followed)}
        found.append(times | waits | {"messages": sum(told) / hint.num_actions})
    for pipe in (static, swift):
        pipe.close()
    return found


def between(schedule: Schedule, trace: Trace) -> float:
    """By how much a step is longer than its own passes in their order, started as soon as they can be."""
    return makespan(trace) / makespan(replay(schedule, measured_costs(schedule, trace))) - 1


def orders(trace: Trace) -> tuple[Order, ...]:
    """The passes of each rank as they ran."""
    found = []
    for rank in range(trace.num_ranks):
        spans = whole_passes(trace).on(rank)
        rows = np.stack([spans.stage, spans.op, spans.microbatch], axis=1).tolist()
        found.append(Order.of(Action(stage, Op(op), i) for stage, op, i in rows))
    return tuple(found)


def line(hint: Schedule, shape: Shape, seeds: int) -> dict[str, Any]:
    by_rank = harness.launch(measure, hint, shape, seeds, world=MEMBERS * shape.ranks)
    leading, following = by_rank[0], by_rank[1]
    costs = [100 * (one["swift"] / one["replay"] - 1) for one in leading]
    return {
        "hint": hint.name,
        "limit": shape.limit,
        "sigma": shape.sigma,
        "hint, s": median(one["hint"] for one in leading),
        "swift, s": median(one["swift"] for one in leading),
        "replay, s": median(one["replay"] for one in leading),
        "cost %": median(costs),
        "led %": 100 * median(one["led"] for one in leading),
        "followed %": 100 * median(one["followed"] for one in leading),
        "least": min(costs),
        "most": max(costs),
        "over hint %": median(100 * (one["swift"] / one["hint"] - 1) for one in leading),
        "messages": "{:.2f} {:.2f}".format(*(median(one["messages"] for one in mine) for mine in (leading, following))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--milliseconds", type=float, default=10)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.0, 0.4])
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    for sigma in options.sigma:
        for hint in ("zb-h1", "zb-h2"):
            limit = options.ranks * (1 if hint == "zb-h1" else 2)
            shape = Shape(options.ranks, options.microbatches, options.milliseconds / 1e3, limit, sigma)
            row = line(schedules.build(hint, shape.ranks, shape.microbatches), shape, options.seeds)
            harness.print_row(row, header=not table)
            table.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
