"""Losses and figures that a layer inside the model has to tell, besides the value that it hands on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeswift.runtime.peers import Peers
from pipeswift.runtime.recorder import clock
from pipeswift.trace import Counter


class Figures(NamedTuple):
    """What a layer reports, by name: sums and means over the samples that it has seen."""

    sums: Mapping[str, Tensor]
    means: Mapping[str, Tensor]


class Told(NamedTuple):
    """Figures of one micro-batch. moment: by `recorder.clock`."""

    weight: float
    figures: Figures
    moment: float


class Auxiliary:
    """Of one stage. The stage says which micro-batch its passes are of; layers and their graphs ask.

    weight: the micro-batch's share of the mini-batch, times the step's scale. With it an auxiliary loss counts, so that
    what is minimised is its mean over micro-batches, as it is for the loss. losses: whether some layer has any.
    """

    def __init__(self) -> None:
        self.losses = False
        self.weight = 0.0
        self._microbatch: int | None = None  # None: in a backward, which may run a forward again
        self._told: dict[str, dict[int, Told]] = {}

    def during_forward(self, microbatch: int, weight: float) -> None:
        self._microbatch, self.weight = microbatch, weight

    def during_backward(self, weight: float) -> None:
        self._microbatch, self.weight = None, weight

    def tell(self, layer: str, figures: Figures) -> None:
        """Files a layer's figures of one micro-batch; what a forward tells when it is run again is not filed."""
        if self._microbatch is not None:
            self._told.setdefault(layer, {})[self._microbatch] = Told(self.weight, figures, clock())

    def collect(self) -> dict[str, Figures]:
        """By layer, over the micro-batches since the last call, in their order."""
        told, self._told = self._told, {}
        return {layer: together([seen[i][:2] for i in sorted(seen)]) for layer, seen in told.items()}

    def counters(self, rank: int) -> Iterator[Counter]:
        """How each sum of several numbers has come about since the last `collect`, a counter for every number.

        "1.1: rows 3" is number 3, an expert's, of "rows" in layer 1.1: that of the micro-batch told of last.
        """
        for layer, seen in self._told.items():
            told = sorted(seen.values(), key=lambda one: one.moment)
            moments = np.array([one.moment for one in told])
            for name in (name for name, numbers in told[0].figures.sums.items() if numbers.ndim):
                values = torch.stack([one.figures.sums[name] for one in told]).cpu().numpy()
                for index, column in enumerate(values.T):
                    yield Counter(f"{layer}: {name} {index}", rank, moments, column)


def together(figures: Sequence[tuple[float, Figures]]) -> Figures:
    """Sums are added up, means averaged by the weight that stands with each."""
    weights = [weight for weight, _ in figures]
    whole = sum(weights)
    first = figures[0][1]
    means = {
        name: sum((weight / whole * one.means[name] for weight, one in figures), torch.zeros(()))
        for name in first.means
    }
    sums = {name: torch.stack([one.sums[name] for _, one in figures]).sum(0) for name in first.sums}
    return Figures(sums, means)


def gather_figures(peers: Peers, figures: Mapping[str, Figures]) -> dict[str, Figures]:
    """What layers of all ranks and replicas have reported, by layer, on every rank. Every rank must call this."""
    everyone = peers.everyone.all_gather(figures)
    layers = dict.fromkeys(layer for theirs in everyone for layer in theirs)
    return {layer: together([(1.0, theirs[layer]) for theirs in everyone if layer in theirs]) for layer in layers}


def attach(carrier: Tensor, loss: Tensor, auxiliary: Auxiliary) -> Tensor:
    """`carrier` itself; where its gradient passes, the gradient of `loss` starts, with the micro-batch's weight."""
    return _Attach.apply(carrier, loss, auxiliary)  # pyright: ignore[reportReturnType]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, auxiliary: Auxiliary) -> Tensor:
        ctx.auxiliary, ctx.like = auxiliary, (loss.dtype, loss.device)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return gradients[0], torch.tensor(ctx.auxiliary.weight, dtype=dtype, device=device), None
