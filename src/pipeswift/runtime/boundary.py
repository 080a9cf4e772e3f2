"""What crosses a boundary between stages: any nesting of tensors and plain values, flattened to a list of tensors.

The `Spec` says how to put the value together again and which tensors carry a gradient back. Both sides of a boundary
hold the same Spec, so they agree on every message without asking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeswift.errors import PipeSwiftError


class Meta(NamedTuple):
    """What a receiver must know about one tensor to make room for it."""

    shape: torch.Size
    dtype: torch.dtype
    needs_grad: bool


class Place(NamedTuple):
    """Stands in a tree where a tensor was."""

    number: int


class Node(NamedTuple):
    """Stands in a tree where a container was; `kind` rebuilds it from its children, in the order of `keys`."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


class Spec(NamedTuple):
    """tree: Place, Node or a plain value. tensors: one Meta per tensor, in the order of their places."""

    tree: Any
    tensors: tuple[Meta, ...]

    def differentiable(self) -> tuple[Meta, ...]:
        """The tensors whose gradients come back over the boundary."""
        return tuple(meta for meta in self.tensors if meta.needs_grad)


class Flat(NamedTuple):
    """A value in the form in which it crosses.

    Its micro-batch is `samples` of the mini-batch's `batch` samples, from `first_sample`.
    """

    tensors: tuple[Tensor, ...]
    spec: Spec
    first_sample: int = 0
    samples: int = 0
    batch: int = 0


_LONE = Place(0)  # the usual value, one tensor, takes a short way


def flatten(value: Any) -> Flat:
    """Takes a value apart. Tuples, lists, dicts, dataclasses and named tuples are containers; all else is plain.

    A tensor that stands in several places crosses once: its gradient then adds up as it would without a boundary.
    """
    if type(value) is Tensor and value.layout is torch.strided:
        return Flat((value,), Spec(_LONE, (Meta(value.shape, value.dtype, value.requires_grad),)))
    tensors: list[Tensor] = []
    tree = _take_apart(value, tensors)
    metas = tuple(Meta(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return Flat(tuple(tensors), Spec(tree, metas))


def unflatten(flat: Flat) -> Any:
    """The value that `flatten` took apart, with the given tensors in their places."""
    return flat.tensors[0] if flat.spec.tree == _LONE else _put_together(flat.spec.tree, flat.tensors)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same containers around changed tensors."""
    flat = flatten(value)
    return unflatten(flat._replace(tensors=tuple(map(change, flat.tensors))))


def first_difference(one: Spec, other: Spec) -> str:
    """Where two specs differ, in words, for error messages."""
    if len(one.tensors) != len(other.tensors):
        return f"{len(one.tensors)} tensors against {len(other.tensors)}"
    for index, (left, right) in enumerate(zip(one.tensors, other.tensors, strict=True)):
        if left != right:
            return f"tensor {index} is {_describe(left)} against {_describe(right)}"
    return "the containers or plain values differ"


def _describe(meta: Meta) -> str:
    grad = "with" if meta.needs_grad else "without"
    return f"{list(meta.shape)} {str(meta.dtype).removeprefix('torch.')} {grad} gradient"


def _take_apart(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise PipeSwiftError(
                f"a stage's output holds a tensor of layout {value.layout}, which cannot cross to another stage: "
                "use a dense tensor (for example tensor.to_dense())"
            )
        for number, known in enumerate(tensors):
            if known is value:
                return Place(number)
        tensors.append(value)
        return Place(len(tensors) - 1)
    members = list(_members(value))
    if not members and not isinstance(value, (tuple, list, Mapping)):
        return value
    keys, children = zip(*members, strict=True) if members else ((), ())
    return Node(type(value), keys, tuple(_take_apart(child, tensors) for child in children))


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((member.name, getattr(value, member.name)) for member in dataclasses.fields(value) if member.init)


def _put_together(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, Place):
        return tensors[tree.number]
    if not isinstance(tree, Node):
        return tree
    children = tuple(_put_together(child, tensors) for child in tree.children)
    try:
        return _rebuild(tree, children)
    except TypeError as error:
        raise PipeSwiftError(
            f"a {tree.kind.__name__} crosses to another stage and cannot be made again from its members ({error}): "
            "use a dict, list, tuple, named tuple or plain dataclass"
        ) from error


def _rebuild(node: Node, children: tuple[Any, ...]) -> Any:
    kind: Callable[..., Any] = node.kind
    if dataclasses.is_dataclass(node.kind):
        return kind(**dict(zip(node.keys, children, strict=True)))
    if issubclass(node.kind, Mapping):
        return kind(dict(zip(node.keys, children, strict=True)))
    return kind(*children) if hasattr(node.kind, "_fields") else kind(children)
