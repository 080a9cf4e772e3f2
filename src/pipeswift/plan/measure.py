"""Profiles made by running layers: on the device at hand, or without values for a machine of stated rates."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeswift.ir import Op
from pipeswift.plan.profile import Layer as LayerProfile
from pipeswift.plan.profile import Profile, ProfileError, Timing
from pipeswift.plan.roofline import Roofline
from pipeswift.plan.specimen import Specimen, Trial, specimens, trials
from pipeswift.runtime.boundary import map_tensors
from pipeswift.runtime.layers import Layer, materialise
from pipeswift.runtime.loss import LossFunction
from pipeswift.runtime.seeds import seeded

Sample = Callable[[int], tuple[Any, Any]]
Meter = Callable[[Callable[[], Any]], float]
OptimizerKind = Callable[..., torch.optim.Optimizer]

_FEWEST_ROUNDS = 3


def measure(
    layers: Sequence[Layer],
    *,
    loss: LossFunction,
    sample: Sample,
    sizes: Sequence[int],
    optimizer: OptimizerKind | None = torch.optim.AdamW,
    device: torch.device | str = "cpu",
    seed: int = 0,
    seconds: float = 2.0,
) -> Profile:
    """What each layer costs on `device` with the threads that torch now uses.

    layers, loss: as in `Pipeline`; layers from one builder share their figures, and each distinct one is held once.
    sample: samples per micro-batch -> (inputs, targets). optimizer: called with parameters; None leaves its bytes at 0.
    seconds: of measuring, about. All layers and sizes take turns until it is over, so that what disturbs the machine
    disturbs them alike.
    """
    device = torch.device(device)
    synchronize = torch.get_device_module(device).synchronize

    def clock(work: Callable[[], Any]) -> float:
        synchronize()
        start = perf_counter()
        work()
        synchronize()
        return perf_counter() - start

    def make(layer: Layer, index: int) -> nn.Module:
        return materialise(copy.deepcopy(layer) if isinstance(layer, nn.Module) else layer, index, seed, device)

    with seeded(seed):
        subjects = specimens(layers, make, device)
        tried = {size: trials(subjects, loss, *_on(device, sample(size))) for size in sizes}
        _run(tried, clock, lambda: _rounds(seconds / 2))
    return _profile(
        subjects, tried, optimizer, source="measured", device=_name(device), threads=torch.get_num_threads()
    )


def estimate(
    layers: Sequence[Layer],
    *,
    loss: LossFunction,
    sample: Sample,
    sizes: Sequence[int],
    flops: float,
    bandwidth: float,
    optimizer: OptimizerKind | None = torch.optim.AdamW,
) -> Profile:
    """What each layer would cost on a machine that does `flops` per second and moves `bandwidth` bytes per second.

    Nothing is computed and no memory taken: tensors have shapes and no values. Each operation takes the longer of its
    FLOPs and its bytes (see `Roofline`). The rest as in `measure`. Raises ProfileError for rates that are not above 0,
    and for a layer that asks for values.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # slow to load

    for name, rate in (("flops", flops), ("bandwidth", bandwidth)):
        if not rate > 0:
            raise ProfileError(f"{name} = {rate} is no rate: give a number above 0 per second, such as 1e12")

    def meter(work: Callable[[], Any]) -> float:
        with Roofline(flops, bandwidth) as roofline:
            work()
        return roofline.seconds

    samples = {size: sample(size) for size in sizes}
    with seeded(0), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        try:
            subjects = specimens(layers, lambda layer, _: _hollow(layer), torch.device("cpu"))
            tried = {
                size: trials(subjects, loss, *map_tensors(fake.from_tensor, batch)) for size, batch in samples.items()
            }
            _run(tried, meter, lambda: range(1))
            device = f"{flops:g} FLOP/s, {bandwidth:g} B/s"
            return _profile(subjects, tried, optimizer, source="analytic", device=device, threads=1)
        except DataDependentOutputException as error:
            raise ProfileError(
                f"a layer's work depends on values, which an analytic profile has none of ({error}): measure it instead"
            ) from None


def _run(tried: dict[int, list[Trial]], meter: Meter, rounds: Callable[[], Any]) -> None:
    """Whole backwards, then split ones: preparing for a split changes a stage's forwards."""
    every = list(dict.fromkeys(trial for row in tried.values() for trial in row))
    for _ in rounds():
        for trial in every:
            trial.seconds[Op.F].append(meter(trial.forward))
            trial.seconds[Op.B].append(meter(trial.backward))
    for trial in every:
        trial.specimen.stage.prepare_split()
        trial.deferred_bytes = trial.weigh_deferred()
    for _ in rounds():
        for trial in every:
            trial.forward()
            trial.seconds[Op.I].append(meter(trial.input_gradient))
            trial.seconds[Op.W].append(meter(trial.weight_gradient))


def _rounds(seconds: float) -> Iterator[None]:
    """Rounds until the time is over, at least a few."""
    end = perf_counter() + seconds
    done = 0
    while done < _FEWEST_ROUNDS or perf_counter() < end:
        yield
        done += 1


def _profile(
    subjects: Sequence[Specimen], tried: dict[int, list[Trial]], optimizer: OptimizerKind | None, **facts: Any
) -> Profile:
    sizes = sorted(tried)
    states = {subject: subject.optimizer_bytes(optimizer) if optimizer else 0 for subject in dict.fromkeys(subjects)}
    layers = []
    for index, subject in enumerate(subjects):
        row = [tried[size][index] for size in sizes]
        layers.append(
            LayerProfile(
                name=type(subject.module).__name__,
                **{op.name: _timing([trial.seconds[op] for trial in row]) for op in Op},
                output_bytes=tuple(trial.output_bytes for trial in row),
                saved_bytes=tuple(trial.saved_bytes for trial in row),
                deferred_bytes=tuple(trial.deferred_bytes for trial in row),
                parameter_bytes=subject.parameter_bytes,
                optimizer_bytes=states[subject],
            )
        )
    return Profile(torch=torch.__version__, sizes=tuple(sizes), layers=tuple(layers), **facts)


def _timing(seconds: Sequence[Sequence[float]]) -> Timing:
    low, middle, high = np.array([np.percentile(row, (25, 50, 75)) for row in seconds]).T
    return Timing(median=tuple(middle.tolist()), spread=tuple((high - low).tolist()))


def _on(device: torch.device, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    return map_tensors(lambda tensor: tensor.to(device), batch)


def _hollow(layer: Layer) -> nn.Module:
    """The layer made of tensors without values; called in a mode in which all new tensors are such."""
    if not isinstance(layer, nn.Module):
        return layer()
    weights = {id(parameter): _like(parameter) for parameter in layer.parameters()}
    buffers = {id(buffer): torch.empty_like(buffer, device="cpu") for buffer in layer.buffers()}
    return copy.deepcopy(layer, memo=weights | buffers)


def _like(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)


def _name(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.get_device_module(device).get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
