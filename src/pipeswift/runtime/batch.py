"""A mini-batch cut into micro-batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.boundary import Flat, flatten, unflatten


class BatchError(PipeSwiftError):
    """A mini-batch cannot be cut into the micro-batches that the schedule works on."""


class Split(NamedTuple):
    """parts: one value per micro-batch, by id. shares: each part's share of the samples; they sum to 1."""

    parts: tuple[Any, ...]
    shares: tuple[float, ...]


def split(value: Any, microbatches: int, what: str) -> Split:
    """Cuts every tensor of `value` along dimension 0, into sizes that differ by at most one, larger ones first.

    Raises BatchError when there is no tensor, when tensors disagree on the batch size, or when it is too small.
    """
    flat = flatten(value)
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in flat.tensors}
    if not sizes:
        raise BatchError(f"{what} hold no tensor on a rank that needs them: pass the mini-batch to step()")
    if len(sizes) > 1:
        raise BatchError(f"{what} hold tensors of different batch sizes (dimension 0): {sorted(sizes)}")
    samples = sizes.pop()
    if samples < microbatches:
        raise BatchError(
            f"{what} hold {samples} samples, fewer than the schedule's {microbatches} micro-batches: "
            f"use a batch of at least {microbatches}, or fewer micro-batches"
        )
    pieces = [_cut(tensor, microbatches) for tensor in flat.tensors]
    parts = tuple(unflatten(Flat(group, flat.spec)) for group in zip(*pieces, strict=True))
    return Split(parts, tuple(piece.shape[0] / samples for piece in pieces[0]))


def _cut(tensor: Tensor, parts: int) -> tuple[Tensor, ...]:
    return tensor.tensor_split(parts)
