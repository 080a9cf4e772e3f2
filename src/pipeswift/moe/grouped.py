"""The grouped product: rows in groups, each group times a matrix of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from pipeswift.runtime.backward import halves
from pipeswift.runtime.rules import Gradients, Rule

_ALIGNMENT = 16  # bytes; torch's grouped product wants every row to start at a multiple
_KERNEL = (torch.float32, torch.bfloat16, torch.float16)


def grouped(x: Tensor, sizes: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Rows of x, (sum of sizes, n), group g times weights[g], (n, m): shape (sum of sizes, m); groups may be empty.

    Each weight gets its own gradient, zeros where its group is empty; in a split backward in W.
    """
    return halves(_rule(tuple(sizes)), x, *weights)


def bank(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights as one tensor (groups, n, m) over their own memory, if they lie there one after the other."""
    first = weights[0]
    storage, size = first.untyped_storage().data_ptr(), first.numel()
    for number, weight in enumerate(weights):
        offset = first.storage_offset() + number * size
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != offset:
            return None
        if weight.shape != first.shape or not weight.is_contiguous():
            return None
    shape = (len(weights), *first.shape)
    return first.detach().as_strided(shape, (size, first.shape[1], 1))


def _rule(sizes: tuple[int, ...]) -> Rule:
    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        return _product(x, sizes, weights, transposed=False)

    def to_input(gradient: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        return _product(gradient, sizes, weights, transposed=True)

    def to_weights(gradient: Tensor, x: Tensor, *weights: Tensor | None) -> Gradients:
        # Group by group: so each gradient is a tensor of its own, as an optimizer expects it.
        groups = zip(x.split(sizes), gradient.split(sizes), weights, strict=True)
        return tuple(None if weight is None else rows.t().mm(theirs) for rows, theirs, weight in groups)

    return Rule(forward, to_input, to_weights)


def _product(x: Tensor, sizes: tuple[int, ...], weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """One kernel where torch has one for this, else a product per group."""
    together = bank(weights) if _has_kernel(x, weights[0]) else None
    if together is not None:
        ends = torch.tensor(tuple(accumulate(sizes)), dtype=torch.int32, device=x.device)
        return grouped_mm(x, together.transpose(1, 2) if transposed else together, offs=ends)
    matrices = (weight.t() for weight in weights) if transposed else weights
    return torch.cat([rows.mm(matrix) for rows, matrix in zip(x.split(sizes), matrices, strict=True)])


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight.shape)
    return aligned and x.dtype in _KERNEL and x.dtype == weight.dtype and x.is_contiguous()
