"""The model as a list of layers, and how a rank gets the ones it holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import nn

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.seeds import mix, seeded

Layer = nn.Module | Callable[[], nn.Module]


class LayerError(PipeSwiftError):
    """The list of layers cannot be cut as asked."""


def even_layout(layers: int, stages: int) -> tuple[int, ...]:
    """How many layers each stage gets: sizes differ by at most one, the longer ones first; no stage is empty."""
    if layers < stages:
        raise LayerError(
            f"the model has {layers} layers and the schedule {stages} stages, but every stage needs at least one "
            f"layer: use at most {layers} stages (ranks times chunks), or a model of at least {stages} layers"
        )
    size, longer = divmod(layers, stages)
    return tuple(size + (stage < longer) for stage in range(stages))


def check_layout(layout: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """The caller's own cut, if it is one: one positive size per stage that together make up the model."""
    if len(layout) != stages:
        raise LayerError(f"layout names {len(layout)} stages, but the schedule has {stages}: give {stages} sizes")
    if any(size < 1 for size in layout) or sum(layout) != layers:
        raise LayerError(
            f"layout {list(layout)} does not cut {layers} layers: every size must be at least 1 and their sum "
            f"{layers}, for example {list(even_layout(layers, stages))}"
        )
    return tuple(layout)


def layers_of(model: nn.Module | Sequence[Layer]) -> Sequence[Layer]:
    """The layers of an nn.Sequential or of a list; anything else is refused."""
    if isinstance(model, nn.Sequential):
        return list(model)
    if isinstance(model, Sequence) and all(isinstance(layer, nn.Module) or callable(layer) for layer in model):
        return model
    raise LayerError(
        f"layers must be an nn.Sequential, or a list of modules or of functions that build them; got "
        f"{type(model).__name__}"
    )


def materialise(layer: Layer, index: int, seed: int, device: torch.device) -> nn.Module:
    """Layer number `index` as a module on `device`.

    A builder, or the initialisation of a module on the meta device, runs under a seed of its own, so any cut gives the
    same weights.
    """
    with seeded(mix(seed, index)):
        module = layer if isinstance(layer, nn.Module) else layer()
        if not isinstance(module, nn.Module):
            raise LayerError(f"layer {index}: its builder returned {type(module).__name__}, not an nn.Module")
        if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
            _initialise(module, index, device)
    return module.to(device)


def _initialise(module: nn.Module, index: int, device: torch.device) -> None:
    """Gives a module on the meta device memory and, by its parts' `reset_parameters`, values."""
    module.to_empty(device=device)
    for name, part in module.named_modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        reset = getattr(part, "reset_parameters", None)
        if own and reset is None:
            raise LayerError(
                f"layer {index} is on the meta device, and {name or type(part).__name__} has weights but no "
                "reset_parameters(): give it one, or pass a function that builds the layer"
            )
        if reset is not None:
            reset()


def warn_of_batch_statistics(module: nn.Module, index: int) -> None:
    """Says that a layer's statistics are taken over less than the mini-batch."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            warnings.warn(
                f"layer {index} has a {type(part).__name__}: its statistics are those of each micro-batch, and so "
                "depend on the number of micro-batches; a norm over features does not",
                stacklevel=2,
            )
