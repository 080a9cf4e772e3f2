"""One layer by itself, as a stage of its own: what is profiled is what the runtime will run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeswift.ir import Op
from pipeswift.program import WHOLE
from pipeswift.runtime.batch import cut
from pipeswift.runtime.boundary import Flat
from pipeswift.runtime.cuts import build_stage
from pipeswift.runtime.footprint import Footprint
from pipeswift.runtime.groups import Group
from pipeswift.runtime.layers import Layer
from pipeswift.runtime.loss import LossFunction, StepLoss
from pipeswift.runtime.stage import Entry

_ENTRY = Entry(0, 0, {})


class Specimen:
    """A module of its own: it gathers gradients and hooks."""

    def __init__(self, module: nn.Module, index: int, device: torch.device):
        self.module = module
        self.stage = build_stage(index, {index: module}, Group(), WHOLE, device)
        self.parameters = list(module.parameters())

    @property
    def parameter_bytes(self) -> int:
        return _bytes(self.parameters)

    def optimizer_bytes(self, kind: Callable[..., torch.optim.Optimizer]) -> int:
        """What an optimizer of that kind keeps for the layer once it has stepped; gradients must be there."""
        trained = [parameter for parameter in self.parameters if parameter.grad is not None]
        if not trained:
            return 0
        optimizer = kind(trained)
        optimizer.step()
        states = (state for per_parameter in optimizer.state.values() for state in per_parameter.values())
        return _bytes(state for state in states if isinstance(state, Tensor))


class Trial:
    """A specimen under one micro-batch. seconds, deferred_bytes: whoever runs the passes files them.

    tail: turns the last layer's output into the loss. batch: the caller's tensors, which are kept anyway.
    """

    def __init__(self, specimen: Specimen, entered: Flat, tail: StepLoss | None, batch: Sequence[Tensor]):
        self.specimen, self.entered = specimen, entered
        self.seconds: dict[Op, list[float]] = defaultdict(list)
        self.deferred_bytes = 0
        self._stage, self._tail = specimen.stage, tail
        self._excluded = [*specimen.parameters, *batch]
        with Footprint(self._excluded) as footprint:
            self.left = self.forward()
            self.saved_bytes = footprint.bytes
        self.output_bytes = _bytes(self.left.tensors)
        metas = zip(self.left.tensors, self.left.spec.tensors, strict=True)
        self._gradients = tuple(torch.ones_like(tensor) for tensor, meta in metas if meta.needs_grad)
        self.backward()

    def forward(self) -> Flat:
        self._stage.tail = self._tail
        return self._stage.forward(0, _ENTRY, self.entered)

    def backward(self) -> None:
        self._stage.backward(0, 0, self._gradients)

    def input_gradient(self) -> None:
        self._stage.input_gradient(0, 0, self._gradients)

    def weight_gradient(self) -> None:
        self._stage.weight_gradient(0, 0)

    def weigh_deferred(self) -> int:
        """Bytes that stay between I and W; needs a stage that is prepared to split."""
        with Footprint(self._excluded) as footprint:
            self.forward()
            self.input_gradient()
            kept = footprint.with_also(self._stage.deferred(0, 0))
        self.weight_gradient()
        return kept


def specimens(layers: Sequence[Layer], make: Callable[[Layer, int], nn.Module], device: torch.device) -> list[Specimen]:
    """One per layer; layers from the same builder share one, so that equal layers get equal figures.

    make: (layer, index) -> a module that is no one else's. The last layer has one of its own, since the loss is
    computed with it.
    """
    found: dict[tuple[int, bool], Specimen] = {}
    for index, layer in enumerate(layers):
        key = id(layer), index == len(layers) - 1
        if key not in found:
            found[key] = Specimen(make(layer, index), index, device)
    return [found[id(layer), index == len(layers) - 1] for index, layer in enumerate(layers)]


def trials(subjects: Sequence[Specimen], loss: LossFunction, inputs: Any, targets: Any) -> list[Trial]:
    """One per layer, each entered by what the one before hands on; equal specimens entered alike share one."""
    (first,), (last,) = cut(inputs, 1, "inputs"), cut(targets, 1, "targets")
    flat, tail = first.flat(), StepLoss(loss, [last.value], [1.0])
    batch = [*flat.tensors, *last.flat().tensors]
    found: list[Trial] = []
    for subject in subjects:
        ends = subject is subjects[-1]
        same = (trial for trial in found if trial.specimen is subject and trial.entered.spec == flat.spec)
        found.append(next(same, None) or Trial(subject, flat, tail if ends else None, batch))
        flat = found[-1].left
    return found


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
