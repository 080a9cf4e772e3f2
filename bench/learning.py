"""What stale weights do to learning: the byte model under 1F1B and under PipeDream with each weight policy.

    .venv/bin/python bench/learning.py [--svg FILE] [--json FILE] [--updates N] [--milliseconds MS]

All runs see the same micro-batches in the same order and make the same number of updates, one per 4 micro-batches of 8
sequences, with the same AdamW and the same learning rates. 1F1B flushes for each update; PipeDream runs 16 updates per
order. The passes are real; beside its layers every stage sleeps for a set time in F and twice that in B, so that four
stages take their time as on four devices, however few cores there are. Time counts the steps, without evaluations.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import harness
import pipeswift as ps
from pipeswift.rehearse.kernels import Emulated
from pipeswift.train import data
from pipeswift.train.config import Config, parse
from pipeswift.train.model import builders, next_byte_loss
from pipeswift.train.updates import updates_of

RANKS, PER_UPDATE, SEQUENCES, UPDATES_PER_ORDER = 4, 4, 8, 16
LAYOUT = (3, 2, 2, 3)  # embedding, pause, block; pause, block; pause, block; pause, block, head
NAMES = ("1f1b", "stash", "vertical", "2bw", "none")


class Point(NamedTuple):
    """held_out: nats per byte."""

    sequences: int
    seconds: float
    held_out: float


def config_of(name: str, options: argparse.Namespace) -> Config:
    per_step = 1 if name == "1f1b" else UPDATES_PER_ORDER
    microbatches = PER_UPDATE * per_step
    pipeline = {"pp": RANKS, "schedule": "1f1b"}
    if name != "1f1b":
        pipeline |= {"schedule": "pipedream", "weights": name, "updates_every": PER_UPDATE}
    return parse(
        {
            "model": {"blocks": 4, "width": 64, "heads": 4, "context": 64},
            "train": {
                "steps": options.updates // per_step,
                "batch": SEQUENCES * microbatches,
                "microbatches": microbatches,
                "lr": options.lr,
                "warmup": UPDATES_PER_ORDER // per_step,
            },
            "pipeline": pipeline,
        }
    )


def layers(config: Config, milliseconds: float) -> list[Any]:
    """The model's layers, each stage with a layer that changes nothing and takes its time."""

    def pause() -> nn.Module:
        made = Emulated(config.model.width, F=milliseconds / 1e3, I=2 * milliseconds / 1e3, W=0)
        nn.init.ones_(made.weight.requires_grad_(False))
        return made

    embed, *blocks, head = builders(**config.model.shape)
    return [embed, *(layer for block in blocks for layer in (pause, block)), head]


def curve(config: Config, text: data.Text, options: argparse.Namespace) -> list[Point]:
    """One run on this rank."""
    pipe = ps.Pipeline(
        layers(config, options.milliseconds),
        loss=next_byte_loss,
        schedule=config.build_schedule(),
        mesh=ps.init_mesh(pp=RANKS),
        layout=LAYOUT,
        weights=config.pipeline.weights,
        updates_every=config.pipeline.updates_every,
    )
    updates, per_step = updates_of(pipe, config), config.train.microbatches // PER_UPDATE
    points: list[Point] = []
    seconds = 0.0
    for step in range(config.train.steps):
        batch = drawn(config, text.training, range(step * per_step, (step + 1) * per_step))
        began = perf_counter()
        updates.step(step, [batch])
        seconds += perf_counter() - began
        done = (step + 1) * per_step
        if done % (2 * UPDATES_PER_ORDER) == 0:
            held_out = pipe.evaluate(*drawn(config, text.held_out, range(8)), microbatches=16).loss
            assert held_out is not None
            points.append(Point(done * PER_UPDATE * SEQUENCES, seconds, held_out))
    pipe.close()
    return points


def drawn(config: Config, text: np.ndarray, updates: range) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of these updates, the same for every run."""
    size = PER_UPDATE * SEQUENCES
    parts = [data.batch(text, size=size, context=config.model.context, seed=0, number=update) for update in updates]
    inputs, targets = (np.concatenate(side) for side in zip(*parts, strict=True))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def run(rank: int, world: int, options: argparse.Namespace) -> dict[str, list[Point]]:
    configs = {name: config_of(name, options) for name in NAMES}
    text = data.load(None, window=configs["1f1b"].model.context + 1)
    return {name: curve(config, text, options) for name, config in configs.items()}


def draw(curves: dict[str, list[Point]], path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "pipeswift"}
    with matplotlib.rc_context(style):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
        for name, points in curves.items():
            sequences, seconds, held_out = zip(*points, strict=True)
            label = name if name == "1f1b" else f"pipedream, {name}"
            left.plot(sequences, held_out, label=label, linewidth=1)
            right.plot(seconds, held_out, label=label, linewidth=1)
        left.set(xlabel="sequences", ylabel="held-out loss, nats per byte")
        right.set(xlabel="seconds")
        right.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the curves to this file")
    parser.add_argument("--svg", help="draw them into this file")
    parser.add_argument("--updates", type=int, default=320, help="of each run; a multiple of 32")
    parser.add_argument("--milliseconds", type=float, default=8, help="that a stage sleeps in F; twice that in B")
    parser.add_argument("--lr", type=float, default=4e-3)
    options = parser.parse_args()
    curves: dict[str, list[Point]] = harness.launch(run, options, world=RANKS)[0]
    quick = curves["1f1b"][-1].held_out
    for number, (name, points) in enumerate(curves.items()):
        reached = next((point for point in points if point.held_out <= quick + 0.02), None)
        row = {
            "weights": name,
            "held-out": points[-1].held_out,
            "seconds": points[-1].seconds,
            "as 1f1b after, s": reached.seconds if reached else "never",
        }
        harness.print_row(row, header=not number)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({name: [point._asdict() for point in points] for name, points in curves.items()}, file, indent=1)
    if options.svg:
        draw(curves, options.svg)


if __name__ == "__main__":
    main()
