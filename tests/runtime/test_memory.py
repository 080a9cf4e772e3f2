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
from torch.utils.checkpoint import checkpoint

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.footprint import Footprint, LiveBytes
from pipeswift.simulate import replay
from pipeswift.trace import peak_memory
from tests.procs import Pool
from tests.runtime.models import batch, builders, plain_loop, same, token_loss

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

    def __init__(self, pipe: Pipeline, level: Callable[[Any], int]):
        self._stages, self._level = list(pipe.stages.values()), level
        self.peak = self.left = self._base = 0
        self.changes: dict[tuple[int, Op], int] = {}
        for stage in self._stages:
            for op, method in ((Op.F, "forward"), (Op.I, "input_gradient"), (Op.W, "weight_gradient")):
                setattr(stage, method, partial(self._after, stage.index, op, getattr(stage, method)))

    def _after(self, stage: int, op: Op, call: Callable[..., Any], *arguments: Any) -> Any:
        before = self._level(())
        if not self.changes:
            self._base = before
        result = call(*arguments)
        self.left = self._level(result) - self._base
        self.changes.setdefault((stage, op), self.left + self._base - before)
        self.peak = max(self.peak, self.left)
        return result


def kept(pipe: Pipeline, footprint: Footprint, result: Any) -> int:
    """Bytes that autograd and the backwards that wait for their W keep."""
    pendings = (p for stage in pipe.stages.values() for left in stage._pendings.values() for p in left)
    return footprint.with_also(tensor for p in pendings for tensor in (p.x, p.gradient))


def split_footprints(rank: int, world: int, schedule: str, m: int) -> tuple[dict[tuple[int, Op], int], int, int]:
    """(bytes that the first pass of each kind adds on each stage, peak of a step, what is left after it)."""
    pipe = Pipeline(builders(10), loss=token_loss, schedule=schedule, microbatches=m, mesh=init_mesh(pp=world))
    inputs, targets = batch(2 * m)
    with Footprint([inputs, targets, *(parameter for _, parameter in pipe.named_parameters())]) as footprint:
        watched = Watched(pipe, partial(kept, pipe, footprint))
        pipe.step(inputs, targets)
    pipe.close()
    return watched.changes, watched.peak, watched.left


class Recomputed(nn.Module):
    """A block that keeps only its input, and runs again in I; counts its forwards."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inside, x, use_reentrant=False)

    def _inside(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.block(x)


def recomputed(m: int) -> tuple[list[Callable[[], nn.Module]], Tensor, Tensor]:
    """(layers, all of them checkpointed, the embedding with its integer input too; inputs; targets)"""
    layers: list[Callable[[], nn.Module]] = [lambda build=build: Recomputed(build()) for build in builders(10)]
    return layers, *batch(2 * m)


def alive(live: LiveBytes, result: Any) -> int:
    """Bytes of all tensors but those that a pass hands on."""
    live.forget(getattr(result, "tensors", result) or ())
    return live.bytes()


def recomputing(rank: int, world: int, schedule: str, m: int) -> dict[str, Any]:
    """Bytes by pass, peak, rest, forwards per layer, and the gradients of one step."""
    layers, inputs, targets = recomputed(m)
    pipe = Pipeline(layers, loss=token_loss, schedule=schedule, microbatches=m, mesh=init_mesh(pp=world))
    pipe.step(inputs, targets)  # gradients are there from now on
    blocks = [layer for stage in pipe.stages.values() for layer in stage.layers()]
    gradients = {name: parameter.grad.clone() for name, parameter in pipe.named_parameters()}
    forwards = [block.forwards for block in blocks]
    with LiveBytes() as live:
        watched = Watched(pipe, partial(alive, live))
        pipe.step(inputs, targets)
        left = live.bytes()
    pipe.close()
    return dict(changes=watched.changes, peak=watched.peak, left=left, forwards=forwards, gradients=gradients)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_recomputation_under_a_split_backward(procs: Pool, name: str):
    """Case 8.1: within the simulator's bound, nothing outlives the step. 8.2: two forwards. 8.3: integer inputs."""
    world, m = 4, 8
    by_rank = procs.run(recomputing, name, m, world=world)
    schedule = schedules.build(name, world, m)
    memory = np.zeros((4, schedule.num_stages))
    for rank in by_rank:
        for (stage, op), change in rank["changes"].items():
            memory[op, stage] = change
    predicted = peak_memory(replay(schedule, Costs.uniform(schedule.num_stages)), memory)
    gradients: dict[str, Tensor] = {}
    for rank, seen in enumerate(by_rank):
        assert seen["left"] == 0
        assert seen["peak"] == pytest.approx(predicted[rank], rel=0.1)
        assert set(seen["forwards"]) == {2 * m}
        gradients |= seen["gradients"]
    plain = plain_loop(builders(10), *batch(2 * m), m)[1]
    assert same({name.replace(".block.", "."): gradient for name, gradient in gradients.items()}, plain)


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
