"""The loss, and what is divided by what: only this module says.

A loss function returns either a mean over its micro-batch, or (sum, count). Means are averaged over micro-batches,
weighted by their number of samples. Sums are divided once by the global count, after the last backward of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeswift.errors import PipeSwiftError

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | int | float]]


class LossError(PipeSwiftError):
    """The loss function returned something that is neither a scalar nor (sum, count)."""


@dataclass
class StepLoss:
    """The losses of one step, filed by micro-batch id. `weights` are each micro-batch's share of the samples."""

    function: LossFunction
    targets: Sequence[Any]
    weights: Sequence[float]
    scale: float = 1.0
    values: dict[int, Tensor] = field(default_factory=dict)  # detached means, or sums
    counts: dict[int, float] = field(default_factory=dict)  # only where the function gives (sum, count)

    def __call__(self, microbatch: int, output: Any) -> Tensor:
        """Computes and files the loss of one micro-batch; a scalar in the graph."""
        loss = self.function(output, self.targets[microbatch])
        if isinstance(loss, tuple):
            loss, count = loss
            self.counts[microbatch] = float(count)
        if not isinstance(loss, Tensor) or loss.dim():
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LossError(
                f"loss returned {found} for micro-batch {microbatch}: return a scalar mean, or (sum, count); "
                "for a loss per sample, return loss.mean()"
            )
        self.values[microbatch] = loss.detach()
        return loss

    def seed(self, microbatch: int) -> Tensor:
        """The gradient with which the backward of that micro-batch starts."""
        weight = 1.0 if microbatch in self.counts else self.weights[microbatch] * self.scale
        loss = self.values[microbatch]
        return torch.tensor(weight, dtype=loss.dtype, device=loss.device)

    def table(self) -> Tensor:
        """`blank_table` with what this rank knows."""
        table = blank_table(len(self.targets))
        if self.values:
            filed = list(self.values)
            table[filed, 0] = torch.stack(list(self.values.values())).double().cpu()
            table[filed, 1] = torch.tensor([self.weights[i] for i in filed], dtype=torch.float64)
            table[filed, 2] = torch.tensor([self.counts.get(i, 0.0) for i in filed], dtype=torch.float64)
        return table


def blank_table(microbatches: int) -> Tensor:
    """Shape (microbatches, 3) float64 on the CPU: value, weight, count; zeros for what another rank knows."""
    return torch.zeros(microbatches, 3, dtype=torch.float64)


def total(table: Tensor) -> tuple[float, float | None]:
    """(the step's loss, the global count or None for means) from the tables of all ranks, summed."""
    values, weights, counts = table.T.tolist()
    count = sum(counts)
    if any(counts):
        return sum(values) / count, count
    return sum(value * weight for value, weight in zip(values, weights, strict=True)), None
