"""Layers that know they are part of a pipeline."""

from __future__ import annotations

from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.context import skips
from pipeswift.runtime.keyed import draw_by_sample


class Dropout(nn.Module):
    """Dropout whose mask depends on the seed, the step, the layer and each sample's index in the mini-batch alone.

    So results are the same however the batch is cut into micro-batches and the model into stages, with activation
    checkpointing (that preserves the random state, as it does by default) and without. x: floating point, shape
    (samples, ...). p: probability that an element is dropped; the others are scaled by 1 / (1 - p).
    """

    keyed = True  # asks the runtime to say which sample is which

    def __init__(self, p: float = 0.5):
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise PipeSwiftError(f"Dropout needs a probability p from 0 up to, but not including, 1: got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        mask = draw_by_sample(x, lambda part, generator: part.bernoulli_(1.0 - self.p, generator=generator))
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
        if self.name in skips.values:
            raise PipeSwiftError(f"Stash({self.name!r}) is already taken: Pop it first, or use another name")
        skips.values[self.name] = x
        return x

    def extra_repr(self) -> str:
        return repr(self.name)


class Pop(nn.Module):
    """Takes what `Stash` put aside under the name, and returns (input, what was put aside)."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: object) -> tuple[object, object]:
        if self.name not in skips.values:
            known = ", ".join(sorted(skips.values)) or "nothing"
            raise PipeSwiftError(f"Pop({self.name!r}) finds {known} put aside: a Stash({self.name!r}) must come before")
        return x, skips.values.pop(self.name)

    def extra_repr(self) -> str:
        return repr(self.name)
