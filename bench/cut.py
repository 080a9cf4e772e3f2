"""What the profiled partition is worth: its step against that of an equal cut, and against its own prediction.

    .venv/bin/python bench/cut.py [--json FILE] [--steps N] [--milliseconds T]

First the model of examples/uneven.toml, whose head does the work of several blocks, on two ranks of one thread: cut
into equal numbers of layers, and by a profile. The pipelines take turns in the same processes; "over" is the median of
paired ratios to the profiled cut, "spread" the distance between the largest and the smallest.

Then three equal emulated layers on two ranks, of which the second is twice as fast: the equal cut, and that of the
partitioner. A step is predicted by the replay of the profile's seconds, divided by the ranks' speeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
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

import harness
import pipeswift as ps
from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.plan.measure import measure
from pipeswift.plan.partition import Layers, Machine, layout
from pipeswift.plan.profile import Profile
from pipeswift.rehearse.kernels import Emulated
from pipeswift.runtime.layers import even_layout
from pipeswift.simulate import replay
from pipeswift.trace import makespan
from pipeswift.train import config, sample
from pipeswift.train.model import builders, next_byte_loss

RANKS, MICROBATCHES, WIDTH = 2, 8, 64
SPEEDS = (1.0, 2.0)
EMULATED = 3  # layers
Cuts = dict[str, tuple[int, ...]]


def step_times(
    make: Callable[[tuple[int, ...]], ps.Pipeline], cuts: Cuts, batch: tuple[Tensor, Tensor], steps: int
) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of each step on this rank; pipelines take turns, after one step each to warm up."""
    pipes = {name: make(cut) for name, cut in cuts.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cuts}
    for step in range(steps + 1):
        for name, pipe in pipes.items():
            dist.barrier()
            start = perf_counter()
            pipe.step(*batch)
            if step:
                times[name].append((start, perf_counter()))
    for pipe in pipes.values():
        pipe.close()
    return times


def run_uneven(rank: int, world: int, settings: config.Config, cuts: Cuts, steps: int) -> dict[str, Any]:
    mesh, model = ps.init_mesh(pp=world), settings.model

    def make(cut: tuple[int, ...]) -> ps.Pipeline:
        layers = builders(**model.shape)
        count = settings.train.microbatches
        return ps.Pipeline(layers, loss=next_byte_loss, schedule="1f1b", microbatches=count, mesh=mesh, layout=cut)

    text = torch.randint(256, (2, settings.train.batch, model.context))
    return step_times(make, cuts, (text[0], text[1]), steps)


def run_emulated(rank: int, world: int, seconds: float, cuts: Cuts, steps: int) -> dict[str, Any]:
    mesh, mine = ps.init_mesh(pp=world), seconds / SPEEDS[rank]

    def make(cut: tuple[int, ...]) -> ps.Pipeline:
        layers = [emulated(mine)] * EMULATED
        return ps.Pipeline(layers, loss=mean, schedule="1f1b", microbatches=MICROBATCHES, mesh=mesh, layout=cut)

    inputs = torch.ones(MICROBATCHES, WIDTH)
    return step_times(make, cuts, (inputs, inputs), steps)


def emulated(seconds: float) -> Callable[[], nn.Module]:
    return partial(Emulated, WIDTH, F=seconds, I=seconds, W=seconds)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def together(by_rank: Sequence[dict[str, list[tuple[float, float]]]]) -> dict[str, list[float]]:
    """Seconds of each step, from the first rank's start to the last rank's end."""
    return {
        name: [
            max(end for _, end in parts) - min(start for start, _ in parts)
            for parts in zip(*(times[name] for times in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }


def uneven(steps: int) -> list[dict[str, Any]]:
    settings = config.load(Path(__file__).parents[1] / "examples" / "uneven.toml")
    size, schedule = settings.microbatch, settings.build_schedule()
    profile = sample.measured(settings, [size], optimizer=None, seconds=2.0)
    cuts = {
        "equal layers": even_layout(settings.model.layers, RANKS),
        "by the profile": layout(Layers.profiled(profile, size), schedule),
    }
    times = together(harness.launch(run_uneven, settings, cuts, steps, world=RANKS))
    table = []
    for name, cut in cuts.items():
        ratios = [one / best for one, best in zip(times[name], times["by the profile"], strict=True)]
        table.append({"cut": name, "layers": "-".join(map(str, cut)), "step, ms": 1e3 * median(times[name])})
        table[-1] |= {"over": median(ratios), "spread": max(ratios) - min(ratios)}
        harness.print_row(table[-1], header=len(table) == 1)
    return table


def two_speeds(seconds: float, steps: int) -> list[dict[str, Any]]:
    schedule = schedules.build("1f1b", RANKS, MICROBATCHES)
    inputs = torch.ones(1, WIDTH)
    profile = measure([emulated(seconds)] * EMULATED, loss=mean, sample=lambda _: (inputs, inputs), sizes=[1])
    cuts = {
        "equal layers": even_layout(EMULATED, RANKS),
        "by the partitioner": layout(Layers.profiled(profile), schedule, Machine.of(RANKS, speeds=SPEEDS)),
    }
    times = together(harness.launch(run_emulated, seconds, cuts, steps, world=RANKS))
    table = []
    for name, cut in cuts.items():
        predicted = makespan(replay(schedule, on_ranks(profile, cut)))
        table.append({"cut": name, "layers": "-".join(map(str, cut)), "predicted, ms": 1e3 * predicted})
        table[-1] |= {"measured, ms": 1e3 * median(times[name])}
        table[-1] |= {"throughput": predicted / median(times[name])}
        harness.print_row(table[-1], header=len(table) == 1)
    return table


def on_ranks(profile: Profile, cut: tuple[int, ...]) -> Costs:
    """The cut's costs on ranks of these speeds."""
    costs = profile.costs(cut)
    return replace(costs, seconds=costs.seconds / np.array(SPEEDS)[:, None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--milliseconds", type=float, default=60.0, help="of an emulated kernel on the slower rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("a model with a large head, two ranks")
    tables = {"uneven": uneven(options.steps)}
    print("\nthree emulated layers, ranks of speeds 1 and 2; throughput as a share of the predicted")
    tables["speeds"] = two_speeds(options.milliseconds / 1e3, options.steps)
    if options.json:
        Path(options.json).write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
