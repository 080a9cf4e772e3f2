"""Layers that know they are part of a pipeline."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.context import current
from pipeswift.runtime.seeds import generator_of, mix


class Dropout(nn.Module):
    """Dropout whose mask depends on the seed, the step, the layer and each sample's index in the mini-batch alone.

    So results are the same however the batch is cut into micro-batches and the model into stages. x: floating point,
    shape (samples, ...). p: probability that an element is dropped; the others are scaled by 1 / (1 - p).
    Not for the inside of an activation checkpoint: what is computed again there would get another mask.
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise PipeSwiftError(f"Dropout needs a probability p from 0 up to, but not including, 1: got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        generator = generator_of(x.device)
        mask = torch.empty_like(x)
        for sample in range(x.shape[0]):
            generator.manual_seed(mix(current.key, current.layer, current.first_sample + sample))
            mask[sample].bernoulli_(1.0 - self.p, generator=generator)
        return x * mask.div_(1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


class Stash(nn.Module):
    """Puts its input aside under a name, for a `Pop` in any later layer, and passes it on: a skip connection.

    Where the two are on different stages, what was put aside crosses every boundary between them.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: object) -> object:
        if self.name in current.skips:
            raise PipeSwiftError(f"Stash({self.name!r}) is already taken: Pop it first, or use another name")
        current.skips[self.name] = x
        return x

    def extra_repr(self) -> str:
        return repr(self.name)


class Pop(nn.Module):
    """Takes what `Stash` put aside under the name, and returns (input, what was put aside)."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: object) -> tuple[object, object]:
        if self.name not in current.skips:
            known = ", ".join(sorted(current.skips)) or "nothing"
            raise PipeSwiftError(f"Pop({self.name!r}) finds {known} put aside: a Stash({self.name!r}) must come before")
        return x, current.skips.pop(self.name)

    def extra_repr(self) -> str:
        return repr(self.name)
