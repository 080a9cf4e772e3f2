"""Autocast shares the cast of a leaf between its uses; a split backward sums their gradients where autograd does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeswift.ir import Schedule
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.casts import narrowed
from pipeswift.schedules import build
from tests.procs import Pool
from tests.runtime.models import WIDTH, Embed, Head, batch, plain_loop, same, token_loss


class Narrow(nn.Module):
    """Uses its weights several times under one autocast, its input as well: by linears, by a convolution, by others."""

    def __init__(self, index: int, use_reentrant: bool | None, cached: bool = True):
        super().__init__()
        torch.manual_seed(index)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.over_time = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.queries = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.cached, self.use_reentrant = cached, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cached):
            if self.use_reentrant is None:
                y = self._twice(x)
            else:
                y = checkpoint(self._twice, x, use_reentrant=self.use_reentrant)
            y = y + (self.one(self.queries) @ self.other(self.queries)).mean(0)
        return x + self.one(y.float())

    def _twice(self, x: Tensor) -> Tensor:
        y = self.one(x) * self.other(x).tanh() + torch.bmm(x, self.queries.expand(len(x), -1, -1))
        for _ in range(2):
            y = self.over_time(self.one(y).transpose(1, 2)).transpose(1, 2).sin()
        with torch.autocast("cpu", enabled=False):
            return self.other(y.float())


def train(rank: int, world: int, schedule: Schedule, layers: list) -> dict[str, Tensor]:
    pipe = Pipeline(layers, loss=token_loss, schedule=schedule, mesh=init_mesh(pp=world))
    pipe.step(*batch(8))
    pipe.close()
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 3, 5, 4, 6)])
def test_a_cast_is_the_one_that_operations_share(shape: tuple[int, ...]):
    leaf = nn.Parameter(torch.randn(shape))
    with torch.autocast("cpu", torch.bfloat16):
        one, other = narrowed(leaf, torch.bfloat16), narrowed(leaf, torch.bfloat16)
        product = torch.linalg.vecdot(leaf, torch.ones((1,) + (1,) * leaf.dim())).grad_fn.next_functions[0][0]
        assert one.grad_fn is other.grad_fn is product.next_functions[0][0]
        assert torch.equal(one, leaf.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert narrowed(leaf, torch.bfloat16).grad_fn is not one.grad_fn  # each autocast has its own
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert narrowed(leaf, torch.bfloat16).grad_fn is not narrowed(leaf, torch.bfloat16).grad_fn


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("how", [(None,), (False,), (True,), (None, False)])
def test_every_schedule_sums_as_one_process_does(procs: Pool, name: str, how: tuple[bool | None, ...]):
    layers = [Embed, *(partial(Narrow, index, *how) for index in range(3)), Head]
    piped: dict[str, Tensor] = {}
    for part in procs.run(train, build(name, 2, 4), layers, world=2):
        piped |= part
    assert same(piped, plain_loop(layers, *batch(8), 4)[1])
