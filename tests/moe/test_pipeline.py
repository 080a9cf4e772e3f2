"""A pipeline of MoE layers whose experts are not shared out: the bits of the plain loop, auxiliary losses included."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeswift.errors import PipeSwiftError
from pipeswift.moe import MoE
from pipeswift.runtime import Pipeline, init_mesh
from tests.moe.models import builders, expert_block, plain_loop
from tests.procs import Pool
from tests.runtime.models import Embed, Head, batch, same, token_loss, token_loss_sum

SETTINGS = {"shared": 6, "jitter": 0.1}


def train(rank: int, world: int, layers: list[Any], schedule: str, microbatches: int) -> tuple[Any, ...]:
    mesh = init_mesh(pp=world)
    pipe = Pipeline(layers, loss=token_loss, schedule=schedule, microbatches=microbatches, mesh=mesh)
    result = pipe.step(*batch(8))
    figures = pipe.gather_figures(result)
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    evaluated = pipe.gather_figures(pipe.evaluate(*batch(8)))
    pipe.close()
    return result.losses, gradients, figures, evaluated


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 4), ("zb-h1", 4), ("1f1b", 8)])
def test_losses_and_gradients_are_those_of_the_plain_loop(procs: Pool, schedule: str, microbatches: int):
    layers = builders({"shared": 6})
    losses, gradients = plain_loop(layers, [batch(8)], microbatches)
    for world in (1, 2, 4):
        by_rank = procs.run(train, layers, schedule, microbatches, world=world)
        piped = {name: gradient for _, theirs, _, _ in by_rank for name, gradient in theirs.items()}
        assert list(by_rank[0][0]) == losses
        assert same(piped, gradients), f"pp = {world}"


class Wrapped(nn.Module):
    def __init__(self, recomputed: bool):
        super().__init__()
        self.block, self.recomputed = expert_block(0, SETTINGS), recomputed

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)


def test_figures_are_told_once_and_routing_is_repeated_under_recomputation(procs: Pool):
    """Losses, loads and gradients were once taken twice where a forward is run again."""
    once, again = ([Embed, partial(Wrapped, recomputed), Head] for recomputed in (False, True))
    ((losses, gradients, figures, _),) = procs.run(train, once, "1f1b", 4, world=1)
    assert figures["1.block.1"].sums["rows"].sum() == 8 * 3 * 2, "tokens x top_k, once"
    for world in (1, 3):
        by_rank = procs.run(train, again, "1f1b", 4, world=world)
        assert by_rank[0][0] == losses
        assert same({name: gradient for _, theirs, _, _ in by_rank for name, gradient in theirs.items()}, gradients)
        for _, _, told, evaluated in by_rank:
            assert same(told["1.block.1"].sums, figures["1.block.1"].sums)
            assert same(told["1.block.1"].means, figures["1.block.1"].means)
            assert evaluated["1.block.1"].sums["rows"].sum() == 8 * 3 * 2


def test_the_balance_loss_does_not_depend_on_the_number_of_micro_batches():
    """It once grew with it: a sum over micro-batches instead of a mean."""
    gradients = []
    for microbatches in (1, 4):
        layers = [Embed, partial(expert_block, 0, {"balance": 0.0, "z": 1.0}), Head]
        pipe = Pipeline(layers, loss=lambda y, _: 0 * y.sum(), schedule="1f1b", microbatches=microbatches)
        pipe.step(*batch(8))
        gradients.append({name: p.grad for name, p in pipe.named_parameters() if "router" in name or "norm" in name})
        pipe.close()
    torch.testing.assert_close(*gradients)
    assert gradients[0]["1.1.inlet.router.weight"].abs().sum() > 0


def test_sums_and_counts_are_refused_where_layers_have_losses():
    pipe = Pipeline(builders({}), loss=token_loss_sum, schedule="1f1b", microbatches=2)
    with pytest.raises(PipeSwiftError, match="return a mean, or set their coefficients"):
        pipe.step(*batch(8))
    pipe.close()
    pipe = Pipeline(builders({"balance": 0.0, "z": 0.0}), loss=token_loss_sum, schedule="1f1b", microbatches=2)
    assert pipe.step(*batch(8)).loss
    pipe.close()


def test_a_ready_made_layer_keeps_the_experts_of_its_rank():
    torch.manual_seed(1)
    layer = MoE(8, experts=4, hidden=6)
    expected = [layer.experts.up2.clone(), layer.experts.up3.clone()]  # type: ignore[operator]
    layer.settle(1, 2)
    assert [name for name, _ in layer.experts.named_parameters()] == ["up2", "down2", "up3", "down3"]
    assert torch.equal(layer.experts.up2, expected[0])  # type: ignore[arg-type]
    assert torch.equal(layer.experts.up3, expected[1])  # type: ignore[arg-type]
    with pytest.raises(PipeSwiftError, match="called within another layer"):
        layer(torch.randn(2, 8))
