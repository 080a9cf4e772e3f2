"""Operations on weights whose backward can be cut in two: how to recognise one, and its two halves.

A finder gets the arguments of a call and returns (rule, x, weights), or None to leave the call as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Gradients = tuple[Tensor | None, ...]


class Rule(NamedTuple):
    """An operation y = forward(x, *weights). Each part is exactly what autograd would compute for it."""

    forward: Callable[..., Tensor]
    input: Callable[..., Tensor]  # (gradient of y, x, *weights) -> gradient of x
    weights: Callable[..., Gradients]  # (gradient of y, x, *weights) -> gradients of the weights
    # Lays the xs, or the gradients of the ys, of several calls together, so that `weights` gives the sum of theirs.
    join: Callable[[Sequence[Tensor]], Tensor] | None = None


def _trained(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors])


def _to_x(gradient: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """The gradient of the rows x of a product with `matrix`; to columns that lie in a row, torch gives such again."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    if not x.is_contiguous():
        laid_out = x.reshape(-1, x.shape[-1])
        if laid_out.stride() == (1, len(laid_out)):
            return matrix.mm(rows.t()).t().reshape(x.shape)
    return rows.mm(matrix.t()).view(x.shape)


# Linear: y = x w^T + b.


def _find_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return (_LINEAR, input, (weight, bias)) if _trained(weight) and weight.dim() == 2 and input.dim() > 1 else None


def _linear_weights(gradient: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Gradients:
    rows = gradient.reshape(-1, gradient.shape[-1])
    return (
        None if weight is None else rows.t().mm(x.reshape(-1, x.shape[-1])),
        None if bias is None else _bias(gradient, rows, x),
    )


def _bias(gradient: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """Torch takes a contiguous x as rows with a bias each; to others it adds the bias when they have their shape."""
    return rows.sum(0) if x.is_contiguous() else gradient.sum(tuple(range(gradient.dim() - 1)))


def _linear_input(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _to_x(gradient, x, weight.t())


_LINEAR = Rule(nn.functional.linear, _linear_input, _linear_weights, _rows)


# Products of matrices: y = x w, one or a batch.


def _find_product(input: Tensor, mat2: Any = None, *, other: Any = None, **rest: Any) -> Any:
    weight = other if mat2 is None else mat2  # torch.matmul has its own name for it
    if rest or not _trained(weight) or weight.dim() not in (2, 3) or input.dim() < 2:
        return None
    if weight.dim() == 3 and (input.dim() != 3 or len(input) != len(weight)):
        return None
    return (_PRODUCT if weight.dim() == 2 else _BATCH, input, (weight,))


def _product_input(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _to_x(gradient, x, weight)


def _product_weights(gradient: Tensor, x: Tensor, weight: Tensor) -> Gradients:
    return (x.reshape(-1, x.shape[-1]).t().mm(gradient.reshape(-1, gradient.shape[-1])),)


def _batch_input(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return gradient.bmm(weight.transpose(1, 2))


def _batch_weights(gradient: Tensor, x: Tensor, weight: Tensor) -> Gradients:
    return (x.transpose(1, 2).bmm(gradient),)


def _batch_rows(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([*tensors], dim=1)


_PRODUCT = Rule(torch.matmul, _product_input, _product_weights, _rows)
_BATCH = Rule(torch.bmm, _batch_input, _batch_weights, _batch_rows)


# Embedding: nothing for I to do.


def _find_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not _trained(weight) or sparse or max_norm is not None:
        return None
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]

    def forward(x: Tensor, table: Tensor) -> Tensor:
        return torch.embedding(table, x, padding, scale_grad_by_freq, False)

    def weights(gradient: Tensor, x: Tensor, table: Tensor) -> Gradients:
        backward = torch.ops.aten.embedding_dense_backward
        return (backward(gradient, x, table.shape[0], padding, scale_grad_by_freq),)

    return Rule(forward, _no_input, weights), input, (weight,)


def _no_input(*_: object) -> Tensor:
    raise AssertionError("an embedding's input has no gradient")


# Convolution, over 1 to 3 dimensions.


def _find_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    dimensions = weight.dim() - 2
    if not _trained(weight) or isinstance(padding, str) or input.dim() != weight.dim():
        return None
    shape = tuple(_each(setting, dimensions) for setting in (stride, padding, dilation))
    rest = (*shape, False, [0] * dimensions, groups)

    def forward(x: Tensor, kernel: Tensor, offset: Tensor | None) -> Tensor:
        aten: Any = torch.ops.aten
        return aten.convolution(x, kernel, offset, *rest)

    def backward(gradient: Tensor, x: Tensor, kernel: Tensor, sizes: list[int] | None, mask: list[bool]) -> Gradients:
        aten: Any = torch.ops.aten
        return aten.convolution_backward(gradient, x, kernel, sizes, *rest, mask)

    def to_input(gradient: Tensor, x: Tensor, kernel: Tensor, offset: Tensor | None) -> Tensor:
        made = backward(gradient, x, kernel, None, [True, False, False])[0]
        assert made is not None
        return made

    def to_weights(gradient: Tensor, x: Tensor, kernel: Tensor | None, offset: Tensor | None) -> Gradients:
        sizes = None if offset is None else [*offset.shape]
        mask = [False, kernel is not None, offset is not None]
        return backward(gradient, x, weight if kernel is None else kernel, sizes, mask)[1:]

    return Rule(forward, to_input, to_weights), input, (weight, bias)


def _each(setting: Any, dimensions: int) -> list[int]:
    return [setting] * dimensions if isinstance(setting, int) else list(setting) * (dimensions // len(setting))


#: By the function that is called.
FINDERS: dict[Callable[..., Any], Callable[..., Any]] = {
    nn.functional.linear: _find_linear,
    nn.functional.embedding: _find_embedding,
    torch.matmul: _find_product,
    torch.mm: _find_product,
    torch.bmm: _find_product,
    Tensor.matmul: _find_product,
    Tensor.__matmul__: _find_product,
    Tensor.mm: _find_product,
    Tensor.bmm: _find_product,
    torch.conv1d: _find_convolution,
    torch.conv2d: _find_convolution,
    torch.conv3d: _find_convolution,
}


def find(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(rule, x, weights) of a call whose weights' gradients can wait for W; None leaves the call as it is."""
    finder = FINDERS.get(func)
    found = None if finder is None else finder(*args, **kwargs)
    return found if found is not None and all(map(_can_wait, found[2])) else None


def _can_wait(weight: Tensor | None) -> bool:
    """Whether W may make the gradient: nobody waits for it, and nobody has asked to see it when I makes it."""
    if weight is None or not weight.requires_grad:
        return True
    # The rules are those of real numbers; what a weight was computed from needs its gradient within I.
    if weight.is_complex() or not (_trained(weight) and weight.is_leaf):
        return False
    return not (weight._backward_hooks or weight._post_accumulate_grad_hooks)
