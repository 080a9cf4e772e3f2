"""The layer in one process: it computes what its definition says, and its losses have their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeswift.errors import PipeSwiftError
from pipeswift.moe import MoE
from tests.moe.reference import moe

WIDTH = 8


def build(**settings: Any) -> MoE:
    torch.manual_seed(3)
    return MoE(WIDTH, **({"experts": 4, "hidden": 12, "balance": 0.5, "z": 0.1} | settings))


def inputs(samples: int = 3, length: int = 5) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(samples, length, WIDTH, requires_grad=True)


def gradients(layer: MoE, y: torch.Tensor, loss: torch.Tensor | None, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x.grad = None
    (y.square().sum() + (0 if loss is None else loss)).backward()
    assert x.grad is not None
    found = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    return {"x": x.grad, **found}


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 1}, {"top_k": 3, "scoring": "sigmoid"}, {"shared": 6}, {"top_k": 1, "scoring": "sigmoid"}],
    ids=str,
)
def test_it_is_the_sum_over_the_best_experts(settings):
    layer, x = build(**settings), inputs()
    y, expected = layer(x), moe(layer, x)
    torch.testing.assert_close(y, expected[0])
    torch.testing.assert_close(layer.loss, expected[1])
    ours = gradients(layer, y, layer.loss, x)
    torch.testing.assert_close(ours, gradients(layer, *expected, x))
    assert ours.keys() == {"x", *(name for name, _ in layer.named_parameters())}


@pytest.mark.parametrize("overflow", ["drop", "residual"])
def test_over_capacity_the_rule_holds_and_the_rest_is_counted(overflow):
    layer, x = build(capacity_factor=0.75, overflow=overflow), inputs()
    room = 6  # of 3 x 5 tokens x 2 choices over 4 experts, times 0.75, rounded up
    told = Told()
    layer.report(told, "moe")  # pyright: ignore[reportArgumentType]
    y, (expected, _) = layer(x), moe(layer, x, room=room, residual=overflow == "residual")
    torch.testing.assert_close(y, expected)
    (figures,) = told.figures
    rows, dropped = figures.sums["rows"], figures.sums["dropped"]
    assert rows.sum() == 30
    assert dropped == (rows - room).clamp(min=0).sum() > 0


class Told:
    losses = False

    def __init__(self) -> None:
        self.figures: list[Any] = []

    def tell(self, _: str, figures: Any) -> None:
        self.figures.append(figures)


@torch.no_grad()
def test_the_balance_loss_is_one_when_even_and_the_number_of_experts_when_all_go_to_one():
    layer = build(top_k=1, balance=1.0, z=0.0, norm=nn.Identity())
    router = layer.inlet.router.weight.zero_()
    router[:4, :4] = 1000 * torch.eye(4)
    layer(torch.eye(4, WIDTH))
    assert layer.loss == 1.0
    layer(torch.eye(4, WIDTH)[[2, 2, 2]])
    assert layer.loss == 4.0


def test_an_expert_has_its_weights_whatever_else_is_built():
    few, many = build(), build(shared=16)
    assert torch.equal(few.experts.up3, many.experts.up3)  # pyright: ignore[reportArgumentType]
    assert not torch.equal(few.experts.up3, few.experts.up2)  # pyright: ignore[reportArgumentType]


def test_jitter_routes_equally_in_a_recomputation():
    layer, x = build(jitter=0.5), inputs()
    routes = []
    layer.inlet.register_forward_hook(lambda *hooked: routes.append(hooked[2].order))
    checkpoint(layer, x, use_reentrant=False).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    first, second = routes
    assert torch.equal(first, second)
    layer(x)
    assert not torch.equal(first, routes[2]), "and differently in the next step"


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"top_k": 5}, "top_k = 5 is none of 1 to the number of experts, 4"),
        ({"scoring": "relu"}, "scoring = 'relu'"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0 is not above 0"),
        ({"overflow": "panic"}, "overflow = 'panic'"),
        ({"placement": "somewhere"}, "placement = 'somewhere'"),
        ({"jitter": 1.0}, "jitter = 1.0"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings, part):
    with pytest.raises(PipeSwiftError, match=part):
        build(**settings)
