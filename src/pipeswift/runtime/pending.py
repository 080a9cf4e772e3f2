"""What an I leaves for W: per use of a weight, what the product that makes the weight's gradient needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeswift.runtime.casts import fitting
from pipeswift.runtime.rules import Gradients, Rule


class Pending(NamedTuple):
    """Work left for W, by one operation on weights.

    casts: per parameter, the node of the graph that has cast it, None if it was used as it is; a node leads to its
    parameter alone. task: number of the backward that left it; sums never span two.
    """

    rule: Rule
    gradient: Tensor
    x: Tensor
    parameters: tuple[Tensor | None, ...]
    casts: tuple[object, ...]
    task: int

    def gradients(self) -> Gradients:
        weights = tuple(fitting(parameter, self.x.dtype) for parameter in self.parameters)
        return self.rule.weights(self.gradient, self.x, *weights)

    def of(self, chosen: Callable[[Tensor], bool]) -> Pending | None:
        """The part that is for the chosen parameters; None if it is for none of them."""
        parameters = tuple(w if w is not None and chosen(w) else None for w in self.parameters)
        return self._replace(parameters=parameters) if any(w is not None for w in parameters) else None


@torch.no_grad()
def weight_gradients(pendings: Sequence[Pending]) -> None:
    """W: adds each parameter's gradient to its `.grad`, after summing over its uses, as autograd does."""
    sums = _Sums(pendings)
    for pending in pendings:
        sums.add(pending)  # keeps none of its gradients, so the next are made in their memory, still in the cache


class _Sums:
    """Sums over uses: of a cast in its type, then, of the parameter, in the parameter's; one sum per backward."""

    def __init__(self, pendings: Sequence[Pending]):
        uses = [(p.task, use) for p in pendings for use in (*p.parameters, *p.casts) if use is not None]
        self._left = Counter((task, id(use)) for task, use in uses)
        self._sums: dict[tuple[int, int], Tensor] = {}

    def add(self, pending: Pending) -> None:
        """A parameter's sum goes to its `.grad` at once when it is complete, while it lies in the cache."""
        for parameter, cast, gradient in zip(pending.parameters, pending.casts, pending.gradients(), strict=True):
            if parameter is None:
                continue
            if cast is not None:
                # An autocast around the whole step may have made it in another type than the cast's.
                gradient = self._complete((pending.task, id(cast)), fitting(gradient, pending.x.dtype))
            if gradient is not None and gradient.dtype != parameter.dtype:
                gradient = gradient.to(parameter.dtype)
            total = self._complete((pending.task, id(parameter)), gradient)
            if total is not None:
                _accumulate(parameter, total)

    def _complete(self, key: tuple[int, int], gradient: Tensor | None) -> Tensor | None:
        """Adds to the sum of `key`, and gives it out at the last use."""
        self._left[key] -= 1
        if gradient is not None:
            self._sums[key] = self._sums[key] + gradient if key in self._sums else gradient
        return None if self._left[key] else self._sums.pop(key, None)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def joined(pendings: Sequence[Pending]) -> list[Pending]:
    """The pendings of several micro-batches, those of one operation on one weight laid together to one product.

    The sum over micro-batches then happens inside the product, so its last bits differ from those of one after another.
    """
    groups: dict[Any, list[Pending]] = {}
    for pending in pendings:
        alike = pending.rule, pending.x.dtype, tuple(map(id, pending.parameters))
        groups.setdefault(alike if pending.rule.join else id(pending), []).append(pending)
    return [group[0] if len(group) == 1 else _join(group) for group in groups.values()]


def _join(group: Sequence[Pending]) -> Pending:
    first, join = group[0], group[0].rule.join
    assert join is not None
    return first._replace(gradient=join([p.gradient for p in group]), x=join([p.x for p in group]))
