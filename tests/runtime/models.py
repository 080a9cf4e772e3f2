"""Small models for runtime tests, and the plain training loop that a pipeline must equal bit for bit.

Nothing here imports pipeswift.runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WIDTH, CLASSES = 16, 7


class Block(nn.Module):
    """A residual block with a norm, so that no two layers' gradients are alike."""

    def __init__(self, index: int):
        super().__init__()
        torch.manual_seed(1000 + index)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Embed(nn.Embedding):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(CLASSES, WIDTH)


class Head(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(WIDTH, CLASSES)


def builders(layers: int) -> list[Callable[[], nn.Module]]:
    """A token model of that many layers; every call of a builder gives the same weights."""
    return [Embed, *(partial(Block, index) for index in range(layers - 2)), Head]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_loss_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def batch(samples: int, length: int = 3, seed: int = 5) -> tuple[Tensor, Tensor]:
    """(inputs, targets), both int64 of shape (samples, length)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CLASSES, (samples, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain_loop(
    layers: Sequence[Callable[[], nn.Module]], inputs: Tensor, targets: Tensor, microbatches: int
) -> tuple[list[float], dict[str, Tensor]]:
    """(loss of each micro-batch, gradient of each parameter) of plain torch, micro-batch after micro-batch."""
    model = nn.Sequential(*(build() for build in layers))
    losses = []
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        loss = token_loss(model(x), y)
        (loss / microbatches).backward()
        losses.append(loss.item())
    return losses, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dicts of tensors hold the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
