"""A schedule file made here trains in torch.distributed.pipelining, with the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pipeswift import codec, schedules
from pipeswift.runtime.layers import even_layout
from tests.procs import Pool
from tests.runtime.models import batch, builders, plain_loop, same, token_loss

LAYERS = 6
MICROBATCHES = 4  # torch divides gradients by it at the end, we divide the loss: a power of two makes both exact


def train_in_torch(rank: int, world: int, csv: str, stages: list[int], num_stages: int) -> dict[str, Tensor]:
    layout = even_layout(LAYERS, num_stages)
    pieces = []
    for stage in stages:
        first = sum(layout[:stage])
        numbers = range(first, first + layout[stage])
        pieces.append(nn.Sequential())
        for i in numbers:
            pieces[-1].add_module(str(i), builders(LAYERS)[i]())
    runtime = _PipelineScheduleRuntime(
        [
            PipelineStage(piece, index, num_stages, torch.device("cpu"))
            for piece, index in zip(pieces, stages, strict=True)
        ],
        MICROBATCHES,
        loss_fn=token_loss,
    )
    runtime._load_csv(csv, format="compute_only")
    inputs, targets = batch(2 * MICROBATCHES)
    runtime.step(
        *([inputs] if 0 in stages else []),
        **({"target": targets, "losses": []} if num_stages - 1 in stages else {}),
    )
    return {name: parameter.grad for piece in pieces for name, parameter in piece.named_parameters()}


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved-1f1b"])
def test_our_csv_trains_in_torch(procs: Pool, tmp_path: Path, name: str):
    schedule = schedules.build(name, 2, MICROBATCHES)
    csv = tmp_path / "schedule.csv"
    codec.save(schedule, csv)
    held = [stage for _, stage in schedule.stages_on(0)], [stage for _, stage in schedule.stages_on(1)]
    gradients: dict[str, Tensor] = {}
    for part in procs.run(_by_rank, str(csv), held, schedule.num_stages, world=2):
        gradients |= part
    assert same(gradients, plain_loop(builders(LAYERS), *batch(2 * MICROBATCHES), MICROBATCHES)[1])


def _by_rank(rank: int, world: int, csv: str, held: tuple[list[int], ...], num_stages: int) -> dict[str, Tensor]:
    return train_in_torch(rank, world, csv, held[rank], num_stages)
