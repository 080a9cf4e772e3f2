"""One stage on one rank: a contiguous piece of the model, run one micro-batch and one pass at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeswift.runtime.boundary import Flat, flatten, unflatten
from pipeswift.runtime.seeds import generator_of, mix

UNBOUND: AbstractContextManager[None] = nullcontext()


class Segment:
    """Layers that run without a break; segments of a stage are separate pieces of the autograd graph."""

    def __init__(self, layers: Sequence[nn.Module], first: int, device: torch.device):
        self.layers = tuple(layer.to(device) for layer in layers)
        self.first = first  # global index of the first layer
        self._generator = generator_of(device)

    def __call__(self, value: object, key: int) -> object:
        """Runs the layers; each draws its random numbers from a seed made of `key` and its global index."""
        for index, layer in enumerate(self.layers, self.first):
            self._generator.manual_seed(mix(key, index))
            value = layer(value)
        return value

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for index, layer in enumerate(self.layers, self.first):
            yield from layer.named_parameters(prefix=str(index))


class Record:
    """What a micro-batch leaves on a stage between its forward and its backward, per segment."""

    __slots__ = ("entered", "left")

    def __init__(self, segments: int):
        self.entered: list[tuple[Tensor, ...]] = [()] * segments  # leaves that will hold the input's gradient
        self.left: list[tuple[GradientEdge, ...]] = [()] * segments  # where the output's gradient enters the graph


class Stage:
    """Stage `index` of the pipeline: its segments and what is in flight on it."""

    def __init__(self, index: int, segments: Sequence[Segment]):
        self.index = index
        self.segments = tuple(segments)
        self._records: dict[int, Record] = {}

    @property
    def in_flight(self) -> int:
        """Micro-batches between the start of their F and the end of their B."""
        return len(self._records)

    def bind(self, version: None = None) -> AbstractContextManager[None]:
        """Surrounds every F and every backward. Synchronous training uses the module's own weights: nothing to do."""
        return UNBOUND

    def forward(self, segment: int, microbatch: int, value: Flat, key: int) -> Flat:
        """One segment's F. Keeps what the backward needs, and of the output no more than its place in the graph."""
        entered = tuple(
            tensor.detach().requires_grad_(meta.needs_grad)
            for tensor, meta in zip(value.tensors, value.spec.tensors, strict=True)
        )
        with self.bind():
            out = flatten(self.segments[segment](unflatten(Flat(entered, value.spec)), key))
        if torch.is_grad_enabled():
            record = self._records.setdefault(microbatch, Record(len(self.segments)))
            record.entered[segment] = tuple(leaf for leaf in entered if leaf.requires_grad)
            record.left[segment] = tuple(get_gradient_edge(tensor) for tensor in out.tensors if tensor.requires_grad)
        return Flat(tuple(tensor.detach() for tensor in out.tensors), out.spec)

    def backward(self, segment: int, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One segment's B: accumulates into the parameters, returns the gradients of what entered, in order.

        gradients: one per output tensor that needs a gradient. An input that the graph did not use gets zeros.
        """
        record = self._records[microbatch]
        left, record.left[segment] = record.left[segment], ()
        entered, record.entered[segment] = record.entered[segment], ()
        if left:
            with self.bind():
                torch.autograd.backward(left, tuple(gradients))
        if segment == 0:
            del self._records[microbatch]
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in entered)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter); the name starts with the layer's index in the whole model."""
        for segment in self.segments:
            yield from segment.named_parameters()

    def modules(self) -> Iterator[nn.Module]:
        for segment in self.segments:
            yield from segment.layers
