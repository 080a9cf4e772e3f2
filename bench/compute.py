"""Real compute: transformer blocks under our pipeline, under torch.distributed.pipelining, and in one process.

    .venv/bin/python bench/compute.py [--json FILE] [--pairs N]

Two ranks of one thread each. Ours and torch's schedule of the same name run the same blocks on the same batch in the
same processes, alternating; a pair is one step of each. The table shows tokens per second of every pair.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import harness
import pipeswift as ps
from pipeswift import schedules

BLOCKS, WIDTH, LENGTH, MICROBATCHES = 8, 256, 128, 8
PEERS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved-1f1b": ScheduleInterleaved1F1B}


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def seconds(step: Callable[[], Any]) -> float:
    start = perf_counter()
    step()
    return perf_counter() - start


def pipelined(rank: int, world: int, name: str, samples: int, pairs: int) -> list[tuple[float, float]]:
    """(our seconds, torch's seconds) of each pair of steps."""
    schedule = schedules.build(name, world, MICROBATCHES)
    held = [stage for _, stage in schedule.stages_on(rank)]
    per_stage = BLOCKS // schedule.num_stages
    x = torch.randn(samples * MICROBATCHES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    pipe = ps.Pipeline([block] * BLOCKS, loss=loss, schedule=schedule, mesh=ps.init_mesh(pp=world))
    pieces = [nn.Sequential(*(block() for _ in range(per_stage))) for _ in held]
    stages = [
        PipelineStage(piece, index, schedule.num_stages, torch.device("cpu"))
        for piece, index in zip(pieces, held, strict=True)
    ]
    peer = PEERS[name](stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss)
    arguments = [x] if 0 in held else []
    options = {"target": x, "losses": []} if schedule.num_stages - 1 in held else {}
    systems = (
        (lambda: pipe.step(x, x), [parameter for _, parameter in pipe.named_parameters()]),
        (lambda: peer.step(*arguments, **options), [p for piece in pieces for p in piece.parameters()]),
    )
    times = []
    for pair in range(pairs + 1):
        pair_times = []
        for step, parameters in systems if pair % 2 else systems[::-1]:
            clear(parameters)
            dist.barrier()
            pair_times.append(seconds(step))
        times.append(tuple(pair_times if pair % 2 else pair_times[::-1]))
    pipe.close()
    return times[1:]


def alone(rank: int, world: int, samples: int, steps: int) -> list[float]:
    """Seconds of each step of a plain loop over the same micro-batches."""
    model = nn.Sequential(*(block() for _ in range(BLOCKS)))
    x = torch.randn(samples * MICROBATCHES, LENGTH, WIDTH)

    def step() -> None:
        for part in x.chunk(MICROBATCHES):
            (loss(model(part), part) / MICROBATCHES).backward()

    times = []
    for _ in range(steps + 1):
        clear(list(model.parameters()))
        times.append(seconds(step))
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    for samples in (1, 4):
        tokens = samples * MICROBATCHES * LENGTH
        for threads in (1, 2):
            (times,) = harness.launch(alone, samples, 3, world=1, threads=threads)
            print(f"micro-batch {samples}, one process, {threads} thread(s): {tokens / median(times):.0f} tokens/s")
        for name in PEERS:
            by_rank = harness.launch(pipelined, name, samples, options.pairs, world=2)
            ours = [tokens / max(part[i][0] for part in by_rank) for i in range(options.pairs)]
            theirs = [tokens / max(part[i][1] for part in by_rank) for i in range(options.pairs)]
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            line = {"schedule": name, "micro-batch": samples, "ours": median(ours), "torch": median(theirs)}
            line |= {"ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
            harness.print_row(line, header=True)
            print("   pairs " + " ".join(f"{a:.0f}/{b:.0f}" for a, b in zip(ours, theirs, strict=True)), flush=True)
            table.append(line | {"pairs": list(zip(ours, theirs, strict=True))})
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
