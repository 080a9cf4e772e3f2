"""A mini-batch cut into micro-batches: inputs, targets and arguments, by rules that refuse rather than guess."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.boundary import Flat, flatten, unflatten

T = TypeVar("T")
Rules = Mapping[str, int | None]  # argument -> dimension to cut along, or None: whole to every micro-batch


class BatchError(PipeSwiftError):
    """A mini-batch cannot be cut into the micro-batches that the schedule works on."""


@dataclass(frozen=True)
class Part:
    """What one micro-batch gets of one thing: a value, and where its samples lie in the mini-batch."""

    value: Any
    first_sample: int
    samples: int

    def flat(self, before: int = 0, batch: int = 0) -> Flat:
        """before, batch: samples ahead of this replica's, and those of all replicas."""
        return flatten(self.value)._replace(first_sample=before + self.first_sample, samples=self.samples, batch=batch)


def cut(value: Any, microbatches: int, what: str) -> list[Part]:
    """Micro-batches of `value`, by id.

    A list is taken as ready-made micro-batches and never cut. Anything else is cut along dimension 0 of every tensor,
    into sizes that differ by at most one, larger ones first. Raises BatchError when that cannot be done.
    """
    if isinstance(value, list):
        values = _ready_made(value, microbatches, what)
    else:
        size = batch_size(value, what)
        if size < microbatches:
            raise BatchError(
                f"{what} hold {size} samples, fewer than the schedule's {microbatches} micro-batches: "
                f"use a batch of at least {microbatches}, or fewer micro-batches"
            )
        values = _cut_along(value, microbatches, 0)
    parts, first = [], 0
    for piece in values:
        parts.append(Part(piece, first, batch_size(piece, what)))
        first += parts[-1].samples
    return parts


def arranged(things: Sequence[T], order: Sequence[int] | None) -> list[T]:
    """The micro-batches of something, in the order in which they enter the pipeline."""
    return list(things) if order is None else [things[number] for number in order]


def samples_in(parts: Sequence[Part]) -> int:
    return sum(part.samples for part in parts)


def shares(parts: Sequence[Part], total: int) -> list[float]:
    """Each part's share of all samples, of which there are `total`, on all replicas."""
    if not total:
        raise BatchError("targets hold 0 samples: use at least 1, in one micro-batch or another")
    return [part.samples / total for part in parts]


def cut_arguments(
    arguments: Mapping[str, Any], microbatches: int, rules: Rules, size: int | None
) -> list[dict[str, Any]]:
    """The keyword arguments of each micro-batch.

    An argument with a rule follows it. Without one, a list is taken as ready-made, plain values go whole to every
    micro-batch, and tensors are cut along dimension 0, if that is `size`, the number of samples of the mini-batch
    (None when it is not known on this rank); else BatchError asks for a rule.
    """
    pieces = {name: _argument(name, value, microbatches, rules, size) for name, value in arguments.items()}
    return [{name: piece[i] for name, piece in pieces.items()} for i in range(microbatches)]


def batch_size(value: Any, what: str) -> int:
    """The size of dimension 0, which all tensors of `value` must share."""
    tensors = flatten(value).tensors
    if any(not tensor.dim() for tensor in tensors):
        raise BatchError(
            f"{what} hold a tensor without dimensions, so without samples: give each tensor the batch in dimension 0, "
            "for example tensor.unsqueeze(0) for a batch of 1"
        )
    sizes = {len(tensor) for tensor in tensors}
    if not sizes:
        raise BatchError(f"{what} hold no tensor on a rank that needs them: pass the mini-batch to step()")
    if len(sizes) > 1:
        raise BatchError(f"{what} hold tensors of different batch sizes (dimension 0): {sorted(sizes)}")
    return sizes.pop()


def common_size(inputs: Any, targets: Any) -> int | None:
    """The number of samples of a mini-batch, which inputs and targets share; None when neither is here to be cut."""
    sizes = {
        what: batch_size(value, what)
        for what, value in (("inputs", inputs), ("targets", targets))
        if value is not None and not isinstance(value, list)
    }
    if len(set(sizes.values())) > 1:
        raise unlike(sizes["inputs"], sizes["targets"], "")
    return next(iter(sizes.values()), None)


def unlike(inputs: int, targets: int, where: str) -> BatchError:
    return BatchError(
        f"{where}inputs hold {inputs} samples and targets {targets} (dimension 0): give each sample its target, or "
        "pass lists of ready-made micro-batches"
    )


def check_rules(rules: Rules, keywords: Iterable[str]) -> None:
    """Raises BatchError for a rule that cannot be followed, or whose argument no layer takes."""
    for name, dimension in rules.items():
        if dimension is not None and (not isinstance(dimension, int) or isinstance(dimension, bool)):
            raise BatchError(f"split[{name!r}] = {dimension!r} is no dimension: use a whole number such as 0, or None")
    check_names(rules, keywords, "split names")


def check_names(names: Iterable[str], keywords: Iterable[str], whose: str) -> None:
    """Raises BatchError for a name that is none of the arguments that some layer names."""
    if unknown := set(names).difference(keywords):
        known = ", ".join(sorted(keywords)) or "none"
        raise BatchError(
            f"{whose} {min(unknown)!r}, an argument that no layer takes: arguments that some layer names are {known}"
        )


def _argument(name: str, value: Any, microbatches: int, rules: Rules, size: int | None) -> Sequence[Any]:
    tensors = flatten(value).tensors
    if name in rules:
        dimension = rules[name]
        if dimension is None:
            return [value] * microbatches
        _check(name, tensors, dimension, size)
        return _cut_along(value, microbatches, dimension)
    if isinstance(value, list):
        return _ready_made(value, microbatches, f"argument {name!r}")
    if not tensors:
        return [value] * microbatches
    _check(name, tensors, 0, size)
    return _cut_along(value, microbatches, 0)


def _check(name: str, tensors: Sequence[Tensor], dimension: int, size: int | None) -> None:
    for tensor in tensors:
        found = tensor.shape[dimension] if -tensor.dim() <= dimension < tensor.dim() else None
        if found is None or (size is not None and found != size):
            raise BatchError(
                f"argument {name!r} of shape {list(tensor.shape)} cannot be cut along dimension {dimension} into the "
                f"micro-batches of a batch of {size}: say how with Pipeline(..., split={{{name!r}: dimension}}), or "
                f"split={{{name!r}: None}} to give it whole to every micro-batch"
            )


def _ready_made(values: list[Any], microbatches: int, what: str) -> list[Any]:
    if len(values) != microbatches:
        raise BatchError(
            f"{what} are a list of {len(values)} micro-batches, but the schedule has {microbatches}: pass a list of "
            f"{microbatches}, or one mini-batch (a tensor, tuple or dict) to have it cut"
        )
    return values


def _cut_along(value: Any, parts: int, dimension: int) -> list[Any]:
    flat = flatten(value)
    pieces = [tuple(map(_own, tensor.tensor_split(parts, dim=dimension))) for tensor in flat.tensors]
    return [unflatten(flat._replace(tensors=group)) for group in zip(*pieces, strict=True)]


def _own(piece: Tensor) -> Tensor:
    """The piece with a version of its own: a layer that changes it in place leaves its neighbours as they are."""
    return piece.data.requires_grad_(piece.requires_grad)
