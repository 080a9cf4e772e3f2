"""Losses and figures that a layer inside the model has to tell, besides the value that it hands on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Auxiliary:
    """Of one stage. The stage says which micro-batch its passes are of; its layers read it.

    weight: the micro-batch's share of the mini-batch, times the step's scale, with which its auxiliary losses count, so
    that they are means over micro-batches as the loss is. Graphs refer to this object and look when they run backward.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._microbatch: int | None = None  # None: in a backward, where a forward that is run again has been told of
        self._told: dict[tuple[str, int], Any] = {}

    def during_forward(self, microbatch: int) -> None:
        self._microbatch = microbatch

    def during_backward(self, weight: float) -> None:
        self._microbatch, self.weight = None, weight

    def tell(self, layer: str, figures: Any) -> None:
        """Files what a layer has to report of the micro-batch in its forward."""
        if self._microbatch is not None:
            self._told[layer, self._microbatch] = figures

    def collect(self) -> dict[str, dict[int, Any]]:
        """What layers have told since the last call: by layer, then by micro-batch."""
        told, self._told = self._told, {}
        by_layer: dict[str, dict[int, Any]] = {}
        for layer, microbatch in sorted(told):
            by_layer.setdefault(layer, {})[microbatch] = told[layer, microbatch]
        return by_layer


def attach(carrier: Tensor, loss: Tensor, auxiliary: Auxiliary) -> Tensor:
    """`carrier` itself; where its gradient passes, `loss` gets its own: the weight of the micro-batch."""
    return _Attach.apply(carrier, loss, auxiliary)  # pyright: ignore[reportReturnType]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, auxiliary: Auxiliary) -> Tensor:
        ctx.auxiliary = auxiliary
        ctx.form = loss.dtype, loss.device
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.form
        return gradients[0], torch.tensor(ctx.auxiliary.weight, dtype=dtype, device=device), None
