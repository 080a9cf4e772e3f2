"""The experts that one rank holds of a layer: feed-forward networks, computed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeswift.moe.grouped import bank, grouped
from pipeswift.runtime.seeds import mix, seeded


class Experts(nn.Module):
    """y = gelu(x up) down for each expert, without biases; parameters `up3` and `down3` are those of expert 3.

    held: the layer's experts that are here, by local index. Each is initialised under a seed of its own, so it has the
    same weights wherever it is. scale: of the outputs, for inputs of variance 1.
    expert_parallel: tells the runtime that other ranks of an expert-parallel group hold others.
    The matrices of a rank lie one after the other in memory, so one grouped product can take them as they are.
    """

    expert_parallel = True

    def __init__(self, width: int, hidden: int, held: Sequence[int], *, seed: int, scale: float = 1.0):
        super().__init__()
        self.held = tuple(held)
        ups, downs = torch.empty(len(held), width, hidden), torch.empty(len(held), hidden, width)
        for index, expert in enumerate(self.held):
            with seeded(mix(seed, expert)):
                nn.init.normal_(ups[index], std=width**-0.5)
                nn.init.normal_(downs[index], std=scale * hidden**-0.5)
        self._hold(ups, downs)

    def forward(self, rows: Tensor, sizes: Sequence[int], first: int = 0) -> Tensor:
        """rows: (sum of sizes, width), sorted by expert: sizes[0] of local expert `first`, sizes[1] of the next..."""
        local = range(first, first + len(sizes))
        inner = grouped(rows, sizes, [self._matrix("up", index) for index in local])
        inner = nn.functional.gelu(inner, approximate="tanh")
        return grouped(inner, sizes, [self._matrix("down", index) for index in local])

    def keep(self, held: Sequence[int]) -> None:
        """Lets go of all experts but these."""
        ups, downs = (self._together(kind, [self.held.index(expert) for expert in held]) for kind in ("up", "down"))
        for expert in self.held:
            delattr(self, f"up{expert}")
            delattr(self, f"down{expert}")
        self.held = tuple(held)
        self._hold(ups, downs)

    def extra_repr(self) -> str:
        width, hidden = self._matrix("up", 0).shape
        return f"{width}, {hidden}, held={list(self.held)}"

    def _hold(self, ups: Tensor, downs: Tensor) -> None:
        for index, expert in enumerate(self.held):
            self.register_parameter(f"up{expert}", nn.Parameter(ups[index]))
            self.register_parameter(f"down{expert}", nn.Parameter(downs[index]))

    def _matrix(self, kind: str, index: int) -> nn.Parameter:
        return getattr(self, f"{kind}{self.held[index]}")

    def _together(self, kind: str, indices: Sequence[int]) -> Tensor:
        return torch.stack([self._matrix(kind, index).detach() for index in indices])

    def _apply(self, fn, recurse: bool = True):
        """After a move to another device or dtype: the matrices lie one after the other again."""
        super()._apply(fn, recurse)
        everyone = range(len(self.held))
        for kind in ("up", "down"):
            weights = [self._matrix(kind, index) for index in everyone]
            if bank(weights) is None:
                for weight, matrix in zip(weights, self._together(kind, everyone), strict=True):
                    weight.data = matrix
        return self
