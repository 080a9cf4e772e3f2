"""The loss, and what is divided by what: only this module says.

A loss function returns either a mean over its micro-batch, or (sum, count). Means are averaged over micro-batches,
weighted by their number of samples. Sums are divided once by the global count, after the last backward of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.boundary import flatten

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | int | float]]


class LossError(PipeSwiftError):
    """The loss function returned something that is neither a scalar nor (sum, count)."""


@dataclass
class StepLoss:
    """The losses of one step, filed by micro-batch id. `weights` are each micro-batch's share of the samples.

    of_update: its share of its update's samples, where a step makes several updates.
    """

    function: LossFunction
    targets: Sequence[Any]
    weights: Sequence[float]
    scale: float = 1.0
    of_update: Sequence[float] | None = None
    values: dict[int, Tensor] = field(default_factory=dict)  # detached means, or sums
    counts: dict[int, float] = field(default_factory=dict)  # only where the function gives (sum, count)

    def __call__(self, microbatch: int, output: Any) -> Tensor:
        """Computes and files the loss of one micro-batch; a scalar in the graph."""
        returned = loss = self.function(output, self.targets[microbatch])
        counted = isinstance(returned, tuple) and len(returned) == 2
        if counted:
            if self.of_update is not None:
                raise LossError(
                    "loss returned (sum, count), but stages that update on their own do not learn the count of an "
                    "update in time: return a scalar mean, such as sum / count"
                )
            loss, count = returned
            self.counts[microbatch] = _count(count, microbatch)
        if not isinstance(loss, Tensor) or loss.dim() or loss.is_complex():
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) and loss.dim() else _kind(loss)
            raise LossError(
                f"loss returned {found} for micro-batch {microbatch}: return a scalar mean, or (sum, count); "
                "for a loss per sample, return loss.mean()"
            )
        if self.values and counted != bool(self.counts.keys() & self.values.keys()):
            raise LossError(
                f"loss returned {'(sum, count)' if counted else 'a mean'} for micro-batch {microbatch} and the other "
                "for an earlier one: return the same for all"
            )
        if not loss.requires_grad and torch.is_grad_enabled() and _any_gradient(output):
            raise LossError(
                f"loss returned {_kind(loss)} without gradient for micro-batch {microbatch}, though the model's output "
                "has one: compute it from the output with differentiable operations, without detach() or no_grad()"
            )
        self.values[microbatch] = loss.detach()
        return loss

    def seed(self, microbatch: int) -> Tensor:
        """The gradient with which the backward of that micro-batch starts."""
        shares = self.weights if self.of_update is None else self.of_update
        weight = 1.0 if microbatch in self.counts else shares[microbatch] * self.scale
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


def _kind(loss: object) -> str:
    return f"a scalar of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__


def _count(count: Any, microbatch: int) -> float:
    try:
        if 0 <= float(count) < math.inf:
            return float(count)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise LossError(
        f"loss returned (sum, count) with count = {count!r} for micro-batch {microbatch}: a count is a finite number "
        "from 0, such as the number of tokens, target.numel()"
    )


def _any_gradient(output: Any) -> bool:
    return any(tensor.requires_grad for tensor in flatten(output).tensors)


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
