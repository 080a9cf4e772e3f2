"""What a step keeps alive, in bytes: predicted, measured, and not growing with the number of micro-batches."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.footprint import Footprint
from pipeswift.simulate import replay
from pipeswift.trace import peak_memory
from tests.procs import Pool
from tests.runtime.models import batch, builders, token_loss

ROWS, WIDE = 256, 512  # half a megabyte of float32


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.GELU())


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def resident(what: str) -> int:
    """Kilobytes, from the kernel."""
    return int(re.search(what + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])


def peaks(rank: int, world: int, schedule: str) -> list[int]:
    """The peak of this process's memory in steps of 8 and of 128 micro-batches, in turn."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    pipe = Pipeline([block] * 8, loss=mean_square, schedule=schedule, microbatches=8, mesh=init_mesh(pp=world))
    peaks = []
    for microbatches in (8, 8, 128, 8, 128):
        inputs = torch.zeros(1).expand(microbatches, ROWS, WIDE)  # takes no memory
        Path("/proc/self/clear_refs").write_text("5")
        pipe.step(inputs, inputs, microbatches=microbatches)
        peaks.append(resident("VmHWM"))
    pipe.close()
    return peaks[1:]


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own account of a process's memory")
def test_peak_memory_of_1f1b_does_not_grow_with_the_microbatches(procs: Pool):
    # Cases 16.1, 16.2: what was sent is freed when it is delivered, and the last stage keeps no outputs.
    for first_few, first_many, few, many in procs.run(peaks, "1f1b", world=4):
        # Where a loaded machine lets messages pile up for a moment, a peak is higher, so each is taken twice.
        assert min(first_many, many) <= 1.01 * max(first_few, few)


def weigh(stage: int, layers: tuple[nn.Module, ...], footprint: Footprint, into: dict[int, int]) -> None:
    """Files under `stage` what its first forward adds to the footprint."""

    def before(*_: object) -> None:
        into.setdefault(stage, -footprint.bytes)

    def after(*_: object) -> None:
        into[stage] += footprint.bytes if into[stage] <= 0 else 0

    layers[0].register_forward_pre_hook(before)
    layers[-1].register_forward_hook(after)


def footprints(rank: int, world: int, schedule: str, chunks: int | None, m: int) -> tuple[dict[int, int], int, int]:
    """(bytes that one micro-batch keeps on each stage, peak of a step, what is left after it)."""
    pipe = Pipeline(
        builders(10), loss=token_loss, schedule=schedule, chunks=chunks, microbatches=m, mesh=init_mesh(pp=world)
    )
    one: dict[int, int] = {}
    with Footprint(parameter for _, parameter in pipe.named_parameters()) as footprint:
        for index, stage in pipe.stages.items():
            weigh(index, stage.segments[0].layers, footprint, one)
        pipe.step(*batch(2 * m))
    pipe.close()
    return one, footprint.peak, footprint.bytes


@pytest.mark.parametrize(
    ("name", "chunks"), [("naive", None), ("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 2)]
)
def test_measured_bytes_are_the_simulated_ones(procs: Pool, name: str, chunks: int | None):
    world, m = 2, 6
    by_rank = procs.run(footprints, name, chunks, m, world=world)
    schedule = schedules.build(name, world, m, chunks)
    memory = np.zeros((4, schedule.num_stages))
    for one, _, _ in by_rank:
        for stage, size in one.items():
            memory[:, stage] = size, 0, -size, -size
    predicted = peak_memory(replay(schedule, Costs.uniform(schedule.num_stages)), memory)
    for rank, (_, peak, left) in enumerate(by_rank):
        assert left == 0
        assert peak == pytest.approx(predicted[rank], rel=0.1)


class Watched:
    """Notes, after every pass of a rank's stages, what is kept; and what the first pass of each kind has changed."""

    def __init__(self, pipe: Pipeline, footprint: Footprint):
        self._stages, self._footprint = list(pipe.stages.values()), footprint
        self.peak = self.left = 0
        self.changes: dict[tuple[int, Op], int] = {}
        for stage in self._stages:
            for op, method in ((Op.F, "forward"), (Op.I, "input_gradient"), (Op.W, "weight_gradient")):
                setattr(stage, method, partial(self._after, stage.index, op, getattr(stage, method)))

    def _after(self, stage: int, op: Op, call: Callable[..., Any], *arguments: Any) -> Any:
        result = call(*arguments)
        before, self.left = self.left, self._level()
        self.changes.setdefault((stage, op), self.left - before)
        self.peak = max(self.peak, self.left)
        return result

    def _level(self) -> int:
        pendings = (p for stage in self._stages for left in stage._pendings.values() for p in left)
        return self._footprint.with_also(tensor for p in pendings for tensor in (p.x, p.gradient))


def split_footprints(rank: int, world: int, schedule: str, m: int) -> tuple[dict[tuple[int, Op], int], int, int]:
    """(bytes that the first pass of each kind adds on each stage, peak of a step, what is left after it)."""
    pipe = Pipeline(builders(10), loss=token_loss, schedule=schedule, microbatches=m, mesh=init_mesh(pp=world))
    inputs, targets = batch(2 * m)
    with Footprint([inputs, targets, *(parameter for _, parameter in pipe.named_parameters())]) as footprint:
        watched = Watched(pipe, footprint)
        pipe.step(inputs, targets)
    pipe.close()
    return watched.changes, watched.peak, watched.left


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_measured_bytes_of_a_split_backward_are_the_simulated_ones(procs: Pool, name: str):
    world, m = 2, 8
    by_rank = procs.run(split_footprints, name, m, world=world)
    schedule = schedules.build(name, world, m)
    memory = np.zeros((4, schedule.num_stages))
    for changes, _, _ in by_rank:
        for (stage, op), change in changes.items():
            memory[op, stage] = change
    predicted = peak_memory(replay(schedule, Costs.uniform(schedule.num_stages)), memory)
    for rank, (_, peak, left) in enumerate(by_rank):
        assert left == 0
        assert peak == pytest.approx(predicted[rank], rel=0.1)
