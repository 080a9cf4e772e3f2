"""A byte-level transformer language model as a list of layer builders, ready to be cut anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeswift.moe import MoE, Skew
from pipeswift.train.data import BYTES


def builders(
    *,
    blocks: int,
    width: int,
    heads: int,
    context: int,
    vocabulary: int = BYTES,
    experts: Mapping[str, Any] | None = None,
) -> list[Callable[[], nn.Module]]:
    """[embedding, block, ..., head]: zero-argument functions, so that a rank builds only the layers it holds.

    Between layers goes one tensor of shape (batch, context, width). vocabulary: rows of the embedding and of the head.
    experts: what an `MoE` takes, where there is one in the place of each block's MLP, with its skew as (pattern,
        strength).
    """
    # Every block adds twice to what it is given; scaled so, the sum's variance does not grow with depth.
    scale = (2 * blocks) ** -0.5
    block = partial(Block, width, heads, context, scale=scale)
    if experts is not None:
        block = partial(expert_block, width, heads, context, scale=scale, experts=experts)
    return [partial(Embedding, width, vocabulary), *[block] * blocks, partial(Head, width, vocabulary)]


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte; logits (batch, context, vocabulary), targets (batch, context)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Embedding(nn.Module):
    """Bytes, int64 (batch, context), to vectors (batch, context, width)."""

    def __init__(self, width: int, vocabulary: int = BYTES):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)

    def forward(self, text: Tensor) -> Tensor:
        return self.table(text)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to its input; scale: of what is added, at the start of training."""

    def __init__(self, width: int, heads: int, context: int, *, scale: float):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, context, scale=scale)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            linear(width, 4 * width), nn.GELU(approximate="tanh"), linear(4 * width, width, scale=scale)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Mixing(nn.Module):
    """The first half of a block: attention, added to its input."""

    def __init__(self, width: int, heads: int, context: int, *, scale: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, context, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def expert_block(width: int, heads: int, context: int, *, scale: float, experts: Mapping[str, Any]) -> nn.Sequential:
    """A block whose second half is a mixture of experts; in sequence, so that ranks can share the experts out."""
    skew = experts.get("skew")
    moe = MoE(width, scale=scale, **{**experts, "skew": skew and Skew(*skew)})
    return nn.Sequential(Mixing(width, heads, context, scale=scale), moe)


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021, RoFormer, sec. 3.2)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, context: int, *, scale: float):
        super().__init__()
        self.heads = heads
        self.mix = linear(width, 3 * width)
        self.out = linear(width, width, scale=scale)
        # The slowest of a head's pairs turns about 1 rad over 10,000 positions.
        pairs = width // heads // 2
        frequency = 10_000.0 ** (-torch.arange(pairs) / pairs)
        angle = torch.outer(torch.arange(context), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        query, key, value = self.mix(x).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(self.turn(query), self.turn(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, width))

    def turn(self, x: Tensor) -> Tensor:
        """Rotates each pair of components of x, (batch, heads, context, size), by an angle that grows with position."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, first * self.sin + second * self.cos), dim=-1)


class Head(nn.Module):
    """Vectors (batch, context, width) to the next byte's logits (batch, context, vocabulary), near 0 at the start."""

    def __init__(self, width: int, vocabulary: int = BYTES):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = linear(width, vocabulary, scale=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def linear(inputs: int, outputs: int, *, scale: float = 1.0) -> nn.Linear:
    """A linear layer, without bias, that gives outputs of variance scale squared for inputs of variance 1."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale * inputs**-0.5)
    return layer
