"""Placement of experts, and dropping tokens: what each does to a step when a router has favourites.

    .venv/bin/python bench/moe.py [--json FILE] [--steps N] [--ranks N]

One layer on every rank, its experts shared out over all, real compute over gloo. The router is fixed: neighbouring
experts are popular, the first `--hot` of them are chosen `--skew` times as often as the others. All variants run in the
same processes, their steps alternating; a row gives the median of a step and its deviation.

First table: experts placed in their order, and at random (three seeds); the busiest rank's rows are over an even share.
Second table: no token dropped, in one chunk and in two, against capacity factors, with the share of choices that found
no room.
Third table: a small language model trained with tokens sent to experts in full and as bfloat16, on the same data: mean
loss of the last ten steps, and the bytes that dispatches send in a step.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from statistics import fmean, median, pstdev
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import harness
import pipeswift as ps
from pipeswift.moe import MoE
from pipeswift.train import data
from pipeswift.train.model import builders, next_byte_loss

WIDTH, HIDDEN, EXPERTS, TOKENS, MICROBATCHES = 128, 512, 8, 512, 2

PLACEMENTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    **{f"random, seed {seed}": {"placement": "random", "seed": seed} for seed in range(3)},
}
CAPACITIES: dict[str, dict[str, Any]] = {
    "dropless, 1 chunk": {},
    "dropless, 2 chunks": {"chunks": 2},
    "capacity 1.25, drop": {"capacity_factor": 1.25},
    "capacity 1.0, drop": {"capacity_factor": 1.0},
    "capacity 1.0, residual": {"capacity_factor": 1.0, "overflow": "residual"},
}


PAYLOADS = ("full", "bfloat16")
TRAINED = {"blocks": 2, "width": 64, "heads": 4, "context": 64}


class Popular(nn.Module):
    """In the place of a router's norm: makes each token a vector that asks for one expert, by a fixed lottery."""

    ends: Tensor

    def __init__(self, skew: float, hot: int):
        super().__init__()
        weights = torch.tensor([skew if expert < hot else 1.0 for expert in range(EXPERTS)])
        self.register_buffer("ends", (weights / weights.sum()).cumsum(0))

    def forward(self, x: Tensor) -> Tensor:
        ticket = x.detach().sum(-1).mul(1000.0).frac().abs()  # as good as random, and the same in every variant
        asked = torch.searchsorted(self.ends, ticket).clamp(max=EXPERTS - 1)
        return x + 100.0 * nn.functional.one_hot(asked, x.shape[-1])


def layer(skew: float, hot: int, settings: dict[str, Any]) -> MoE:
    torch.manual_seed(settings.get("seed", 0))
    kept = {name: value for name, value in settings.items() if name not in ("seed", "chunks")}
    made = MoE(WIDTH, experts=EXPERTS, hidden=HIDDEN, top_k=1, norm=Popular(skew, hot), balance=0.0, **kept)
    with torch.no_grad():
        made.inlet.router.weight.copy_(torch.eye(EXPERTS, WIDTH))
    return made


def measure(
    rank: int, world: int, variants: dict[str, dict[str, Any]], skew: float, hot: int, steps: int
) -> dict[str, dict[str, Any]]:
    """By variant: seconds of each step, until the last rank is done; and what the busiest rank and all ranks got."""
    mesh = ps.init_mesh(pp=1, ep=world)
    pipes = {
        name: ps.Pipeline(
            [partial(layer, skew, hot, settings)],
            loss=lambda y, _: y.square().mean(),
            schedule="1f1b",
            microbatches=MICROBATCHES,
            mesh=mesh,
            expert_chunks=settings.get("chunks", 1),
        )
        for name, settings in variants.items()
    }
    torch.manual_seed(rank)
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    found: dict[str, dict[str, Any]] = {}
    for _ in range(steps + 2):
        for name, pipe in pipes.items():
            dist.barrier()
            start = perf_counter()
            result = pipe.step(x, x)
            dist.barrier()
            seconds[name].append(perf_counter() - start)
            found[name] = summary(pipe, result)
    for pipe in pipes.values():
        pipe.close()
    return {name: {"seconds": seconds[name][2:], **found[name]} for name in variants}


def summary(pipe: ps.Pipeline, result: Any) -> dict[str, float]:
    """busiest: rows of the rank that gets most, over an even share. dropped: share of choices without room."""
    layers = pipe.gather_figures(result)
    rows = torch.stack([figures.sums["rows"] for figures in layers.values()]).double()
    placement = next(part.placement for _, part in pipe.stages[0].numbered_layers() if isinstance(part, MoE))
    by_rank = torch.stack([rows[:, list(placement.held_by(rank))].sum() for rank in range(placement.ranks)])
    dropped = sum(int(figures.sums["dropped"]) for figures in layers.values())
    return {"busiest": (by_rank.max() / by_rank.mean()).item(), "dropped": dropped / rows.sum().item()}


def trained(rank: int, world: int, steps: int) -> list[dict[str, Any]]:
    """A row per payload; the models start alike and see the same text."""
    text = data.load(None, window=TRAINED["context"] + 1).training
    rows = []
    for payload in PAYLOADS:
        experts = {"experts": EXPERTS, "top_k": 2, "hidden": 128, "payload": payload}
        pipe = ps.Pipeline(
            builders(**TRAINED, experts=experts),
            loss=next_byte_loss,
            microbatches=MICROBATCHES,
            mesh=ps.init_mesh(pp=1, ep=world),
            expert_chunks=1,
        )
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=4e-3)
        losses: list[float] = []
        figures: dict[str, Any] = {}
        for number in range(steps):
            drawn = data.batch(text, size=16 * world, context=TRAINED["context"], seed=0, number=number)
            result = pipe.step(*(torch.from_numpy(part).chunk(world)[rank] for part in drawn))
            losses.append(result.loss or 0.0)
            optimizer.step(clip_norm=1.0)
            figures = pipe.gather_figures(result)
        sent, saved = (sum(int(layer.sums[name]) for layer in figures.values()) for name in ("sent", "saved"))
        pipe.close()
        share = saved / (sent + saved)
        rows.append({"payload": payload, "loss": fmean(losses[-10:]), "MB per step": sent / 1e6, "saved": share})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures there, too")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--training-steps", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--skew", type=float, default=4.0)
    parser.add_argument("--hot", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for title, variants in (("placement", PLACEMENTS), ("dropping", CAPACITIES)):
        print(f"\n{title}: {options.hot} of {EXPERTS} experts {options.skew:g} times as popular, ep = {options.ranks}")
        by_rank = harness.launch(measure, variants, options.skew, options.hot, options.steps, world=options.ranks)
        for number, (name, figures) in enumerate(by_rank[0].items()):
            seconds = figures["seconds"]
            tokens = options.ranks * MICROBATCHES * TOKENS
            row = {
                title: name,
                "step (ms)": median(seconds) * 1e3,
                "deviation": pstdev(seconds) * 1e3,
                "tokens/s": tokens / median(seconds),
                "busiest rank": figures["busiest"],
                "dropped": figures["dropped"],
            }
            harness.print_row(row, header=not number)
            rows.append(row)
    print(f"\npayload: {options.training_steps} steps, ep = {options.ranks}")
    found = harness.launch(trained, options.training_steps, world=options.ranks)[0]
    for number, row in enumerate(found):
        harness.print_row(row, header=not number)
    rows += found
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
