"""A version of a stage's weights: the tensors that passes run on, and the gradients they gather.

Gradients accumulate in float32 at least. For float32 parameters that is what autograd does in `.grad` by itself; for
narrower ones each backward's gradient is folded into a wider copy, so that the sum does not round at every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Weights:
    """The live version: the module's own parameters, by global name, in model order.

    experts: the names of those that differ from replica to replica of an expert group.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], experts: Iterable[str] = ()):
        self.leaves: dict[str, nn.Parameter] = dict(parameters)
        self.experts = frozenset(experts)
        self._narrow = {name: leaf for name, leaf in self.leaves.items() if leaf.dtype not in WIDE}
        self._wide: dict[str, Tensor] = {}

    def fold(self) -> None:
        """After a backward: moves the gradients of narrow parameters into their float32 sums."""
        for name, leaf in self._narrow.items():
            if leaf.grad is None:
                continue
            if name in self._wide:
                self._wide[name].add_(leaf.grad)
            else:
                self._wide[name] = leaf.grad.float()
            leaf.grad = None

    def gradient(self, name: str) -> Tensor | None:
        """The accumulated gradient, float32 or wider; None for a parameter that got none."""
        return self._wide.get(name) if name in self._narrow else self.leaves[name].grad

    def set_gradient(self, name: str, gradient: Tensor) -> None:
        """Replaces the accumulated gradient."""
        if name in self._narrow:
            self._wide[name] = gradient
        else:
            self.leaves[name].grad = gradient

    def divide(self, divisor: float) -> None:
        """Divides every accumulated gradient, in place."""
        for name in self.leaves:
            if (gradient := self.gradient(name)) is not None:
                gradient.div_(divisor)

    def publish(self) -> None:
        """Puts the sums where an optimizer looks for them, `.grad`, in the parameter's own dtype."""
        for name, gradient in self._wide.items():
            self.leaves[name].grad = gradient.to(self.leaves[name].dtype)

    def withdraw(self) -> None:
        """Before the next backward: takes back what `publish` put there, which `fold` would add to the sums again."""
        for name in self._wide:
            self.leaves[name].grad = None

    def clear(self) -> None:
        """Forgets every gradient."""
        self._wide.clear()
        for leaf in self.leaves.values():
            leaf.grad = None

    def set_aside(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Takes these gradients out, so that a step can gather its own; `restore` adds them again."""
        taken = {}
        for name in names:
            if name in self.leaves and (gradient := self.gradient(name)) is not None:
                taken[name] = gradient
                self._wide.pop(name, None)
                self.leaves[name].grad = None
        return taken

    def restore(self, taken: dict[str, Tensor]) -> None:
        for name, earlier in taken.items():
            if (gradient := self.gradient(name)) is not None:
                earlier.add_(gradient)
            self.set_gradient(name, earlier)
