"""Casts as autocast makes them: of a leaf one, for all its uses until the outermost autocast ends.

So the gradients of these uses are summed in the narrow type, before the sum is made wide and added to the leaf's.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipeswift.runtime.engine import saving_hooks


def narrowed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`tensor` in the type of the autocast that is on, as an operation inside it would see it."""
    if tensor is None:
        return None
    leaf = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    if leaf and tensor.dtype == torch.float32 and torch.is_autocast_cache_enabled():
        return _shared(tensor, dtype)
    return tensor.to(dtype)


def fitting(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A weight in the type of an operation's input; integers go with weights of any type."""
    if weight is None or weight.dtype == dtype or not dtype.is_floating_point:
        return weight  # a call of `to` that changes nothing takes as long as the product of a small layer
    return weight.to(dtype)


def _shared(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast of `leaf` that autocast keeps; torch gives it out only as what an operation has saved.

    By vecdot, which autocast narrows and which takes any shape: the sum of a product, here one without elements.
    """
    # Narrow already, or autocast would keep its cast as well; with a gradient, so that the product saves the other.
    nothing = leaf.new_empty((0,) + (1,) * leaf.dim(), dtype=dtype, requires_grad=True)
    # Not with a checkpoint's hooks, which would run its forward again.
    with saved_tensors_hooks(_as_is, _as_is) if saving_hooks() else nullcontext():
        total = torch.linalg.vecdot(leaf, nothing).grad_fn
        assert total is not None
        return total.next_functions[0][0]._saved_self  # pyright: ignore[reportOptionalMemberAccess]


def _as_is(tensor: Tensor) -> Tensor:
    return tensor
