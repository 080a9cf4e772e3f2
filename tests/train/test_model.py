"""The model is a list of builders with one tensor shape at every cut, and starts out knowing nothing."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeswift.moe import Skew
from pipeswift.moe.router import Router
from pipeswift.train.model import Attention, builders, next_byte_loss

SHAPE: dict[str, Any] = {"blocks": 3, "width": 32, "heads": 4, "context": 16}


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [build() for build in builders(**SHAPE)]


def test_every_boundary_is_one_tensor_of_one_shape(layers):
    x = torch.randint(256, (2, 16))
    shapes = []
    for layer in layers:
        x = layer(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(2, 16, 32)] * 4 + [(2, 16, 256)]


def test_the_first_loss_is_that_of_a_guess(layers):
    text = torch.randint(256, (8, 17))
    loss = next_byte_loss(nn.Sequential(*layers)(text[:, :-1]), text[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_depth_does_not_blow_up_the_residual_stream():
    torch.manual_seed(0)
    embedding, *blocks, _ = [build() for build in builders(blocks=12, width=64, heads=4, context=32)]
    x = embedding(torch.randint(256, (4, 32)))
    for block in blocks:
        x = block(x)
    assert x.std() < 2


def test_no_byte_sees_a_later_one(layers):
    model = nn.Sequential(*layers)
    text = torch.randint(256, (1, 16))
    changed = text.clone()
    changed[0, 9] ^= 1
    same = torch.isclose(model(text), model(changed)).all(dim=-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


def test_attention_tells_positions_apart_and_only_by_distance():
    attention = Attention(width=8, heads=1, context=16, scale=1.0)
    query, key = torch.randn(8), torch.randn(8)
    turned_query = attention.turn(query.expand(1, 1, 16, 8))[0, 0]
    turned_key = attention.turn(key.expand(1, 1, 16, 8))[0, 0]
    scores = turned_query @ turned_key.T
    assert torch.allclose(scores.diagonal(-3), scores[3, 0].expand(13), atol=1e-5)
    assert not torch.isclose(scores[3, 0], scores[4, 0])


@pytest.mark.parametrize("heads", range(1, 12))
def test_any_even_head_size_works(heads):
    width = 14 * heads
    assert Attention(width=width, heads=heads, context=4, scale=1.0)(torch.randn(1, 4, width)).shape == (1, 4, width)


def test_every_parameter_gets_a_gradient(layers):
    text = torch.randint(256, (2, 17))
    model = nn.Sequential(*layers)
    next_byte_loss(model(text[:, :-1]), text[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_block_of_experts_is_a_sequence_that_ranks_can_share_out():
    torch.manual_seed(0)
    layers = [build() for build in builders(**SHAPE, experts={"experts": 4, "hidden": 16, "top_k": 1})]
    assert [type(part).__name__ for part in layers[1].children()] == ["Mixing", "MoE"]
    text = torch.randint(256, (8, 17))
    loss = next_byte_loss(nn.Sequential(*layers)(text[:, :-1]), text[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_a_skew_reaches_the_routers():
    (_, block, _) = builders(**SHAPE | {"blocks": 1}, experts={"experts": 4, "hidden": 8, "skew": ("bursty", 3.0)})
    (router,) = (part for part in block().modules() if isinstance(part, Router))
    assert router.skew == Skew("bursty", 3.0)
