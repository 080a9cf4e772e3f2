"""Does a real pipeline do what the simulated one did, when stage times swing and the policy decides as it goes?

    .venv/bin/python bench/dynamic.py [--json FILE] [--seeds N]

Emulated kernels whose F, I and W of one (stage, micro-batch) are longer by one seeded factor, in real processes. For
each seed and policy the step (first start to last end) is compared with the simulation of the same draws, policy and
limits; the last columns show what Swift's decisions cost and how many datagrams told of them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
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
from pipeswift.ir import Op, Schedule
from pipeswift.policy import Calibration, Decision, Ready, Swift, View, calibrate
from pipeswift.policy.diary import tally
from pipeswift.rehearse.kernels import Emulated, sleep_until
from pipeswift.runtime.lookout import MESSAGES
from pipeswift.simulate import PATTERNS, factors, replay, run, varied
from pipeswift.trace import makespan

WIDTH = 64
LATENCY = 3e-4  # seconds of a small message between two ranks, in the simulation
OUTSIDE = 10_000  # the seed of the static run that calibrates


class Shape(NamedTuple):
    """seconds: of F and of I on average; W takes .8 of it. limit: micro-batches in flight on each stage."""

    ranks: int
    microbatches: int
    seconds: float
    limit: int
    sigma: float
    pattern: str

    def costs(self, seed: int) -> Costs:
        nominal = Costs.uniform(self.ranks, F=self.seconds, I=self.seconds, W=0.8 * self.seconds, comm=LATENCY)
        return varied(nominal, self.factors(seed))

    def factors(self, seed: int) -> np.ndarray:
        return factors(seed, self.ranks, self.microbatches, self.sigma, self.pattern)


class Swinging(Emulated):
    """Its n-th F, I and W of a step take `factors[n]` times as long as usual; set `factors` before each step."""

    def __init__(self, shape: Shape):
        super().__init__(WIDTH, F=shape.seconds, I=shape.seconds, W=0.8 * shape.seconds)
        self.factors: list[float] = []
        self._runs: Counter[Op] = Counter()

    def begin(self, factors: np.ndarray) -> None:
        self.factors = factors.tolist()
        self._runs.clear()

    def spend(self, op: Op, start: float) -> None:
        sleep_until(start + self.seconds[op] * self.factors[self._runs[op]])
        self._runs[op] += 1


class Timed(Swift):
    """Swift, and how long each of its decisions took."""

    def __init__(self, *settings: Any, **named: Any):
        super().__init__(*settings, **named)
        self.took: list[float] = []

    def next(self, ready: Ready, view: View) -> Decision:
        start = perf_counter()
        decision = super().next(ready, view)
        self.took.append(perf_counter() - start)
        return decision


def swift(hint: Schedule, shape: Shape, calibration: Calibration, kind: type[Swift] = Swift) -> Swift:
    return kind(hint, {(stage, 0): shape.limit for stage in range(hint.num_stages)}, calibration=calibration)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def measure(rank: int, world: int, hint: Schedule, shape: Shape, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """What each policy did with each seed."""
    calibration = calibrate(replay(hint, shape.costs(OUTSIDE)))
    inputs = torch.ones(shape.microbatches, WIDTH)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("follow", "swift"):
        policies: list[Timed] = []

        def make(schedule: Schedule, policies: list[Timed] = policies) -> Swift:
            policies.append(swift(schedule, shape, calibration, Timed))
            return policies[0]

        settings = {"policy": make, "in_flight": shape.limit} if name == "swift" else {}
        pipe = ps.Pipeline(
            [partial(Swinging, shape)] * world, loss=loss, schedule=hint, mesh=ps.init_mesh(pp=world), **settings
        )
        layers = {stage.index: layer for stage in pipe.stages.values() for layer in stage.layers()}
        for seed in range(-1, seeds):  # the first warms up
            for stage, layer in layers.items():
                layer.begin(shape.factors(max(seed, 0))[stage])
            for policy in policies:
                policy.took.clear()
            dist.barrier()
            result = pipe.step(inputs, inputs)
            trace = pipe.gather_trace(result)
            took = [t for policy in policies for t in policy.took]
            messages = [int(counter.value[-1]) for counter in trace.counters if counter.name == MESSAGES]
            if seed >= 0:
                found.setdefault(name, []).append(
                    {
                        "seconds": makespan(trace),
                        "decision": median(took) if took else 0.0,
                        "messages": sum(messages),
                        "rules": tally(trace.counters, world),
                    }
                )
        pipe.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=50)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.4])
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=["iid"])
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    for pattern in options.patterns:
        for sigma in options.sigma:
            for hint in ("zb-h1", "zb-h2"):
                limit = options.ranks * (1 if hint == "zb-h1" else 2)
                shape = Shape(options.ranks, options.microbatches, options.milliseconds / 1e3, limit, sigma, pattern)
                for line in lines(schedules.build(hint, shape.ranks, shape.microbatches), shape, options.seeds):
                    harness.print_row(line, header=not table)
                    table.append(line)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


def lines(hint: Schedule, shape: Shape, seeds: int) -> list[dict[str, Any]]:
    by_rank = harness.launch(measure, hint, shape, seeds, world=shape.ranks)
    calibration = calibrate(replay(hint, shape.costs(OUTSIDE)))
    policy = swift(hint, shape, calibration)
    slots = {(stage, 0): shape.limit for stage in range(shape.ranks)}
    simulated = {
        "follow": [makespan(replay(hint, shape.costs(seed))) for seed in range(seeds)],
        "swift": [makespan(run(hint, shape.costs(seed), policy, slots)) for seed in range(seeds)],
    }
    found = []
    for name, expected in simulated.items():
        measured = [by_rank[0][name][seed]["seconds"] for seed in range(seeds)]
        ratios = [one / other for one, other in zip(measured, expected, strict=True)]
        found.append(
            {
                "hint": hint.name,
                "limit": shape.limit,
                "pattern": shape.pattern,
                "sigma": shape.sigma,
                "policy": name,
                "measured, s": median(measured),
                "simulated, s": median(expected),
                "ratio": median(ratios),
                "worst": max(ratios, key=lambda ratio: abs(ratio - 1.0)),
                "decision, us": 1e6 * median(part[name][seed]["decision"] for part in by_rank for seed in range(seeds)),
                "messages": median(by_rank[0][name][seed]["messages"] for seed in range(seeds)),
            }
        )
    return found


if __name__ == "__main__":
    main()
