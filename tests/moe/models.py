"""A small MoE model for tests with processes, and the plain loop that it must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeswift.moe import MoE
from tests.runtime.models import WIDTH, Block, Embed, Head, token_loss

Settings = dict[str, Any]


def expert_block(index: int, settings: Settings) -> nn.Sequential:
    """settings: of the MoE; "favourite" is an expert that every token goes to."""
    block = Block(index)
    settings = {"experts": 4, "hidden": 12, "balance": 0.1, "z": 0.01} | settings
    favourite = settings.pop("favourite", None)
    layer = MoE(WIDTH, **settings)
    if favourite is not None:
        layer.inlet.norm = nn.LayerNorm(WIDTH)  # whose outputs are near its bias, to which the router listens
        with torch.no_grad():
            layer.inlet.norm.weight.mul_(0.01)
            layer.inlet.norm.bias.fill_(1.0)
            layer.inlet.router.weight[favourite] += 1.0
    return nn.Sequential(block, layer)


def builders(settings: Settings, blocks: int = 2) -> list[Callable[[], nn.Module]]:
    """[embedding, block with experts, ..., head]."""
    return [Embed, *(partial(expert_block, index, settings) for index in range(blocks)), Head]


def plain_loop(
    layers: Sequence[Callable[[], nn.Module]], batches: Sequence[tuple[Tensor, Tensor]], microbatches: int
) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, gradients) of the unsplit model over the micro-batches of all replicas, one after the other."""
    model = nn.Sequential(*(build() for build in layers))
    experts = [part for part in model.modules() if isinstance(part, MoE)]
    losses = []
    for inputs, targets in batches:
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss = token_loss(model(x), y)
            losses.append(loss.item())
            auxiliary = sum((layer.loss for layer in experts if layer.loss is not None), loss.new_zeros(()))
            ((loss + auxiliary) / (microbatches * len(batches))).backward()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
