"""One gradient norm for the whole model, and the same training run whatever the cut and the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeswift.runtime import Pipeline, init_mesh
from tests.procs import Pool
from tests.runtime.models import batch, builders, same, token_loss

CLIP = 0.5


class Scale(nn.Module):
    """x -> weight * x, so that the gradient of the weight is what a test wants it to be."""

    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def train(rank: int, world: int, schedule: str, chunks: int | None) -> tuple[list[float], list[float], dict]:
    pipe = Pipeline(
        builders(9), loss=token_loss, schedule=schedule, chunks=chunks, microbatches=4, mesh=init_mesh(pp=world)
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    losses, norms = [], []
    for step in range(3):
        losses.append(pipe.step(*batch(8, seed=step)).loss)
        norms.append(optimizer.step(clip_norm=CLIP))
    assert all(parameter.grad is None for _, parameter in pipe.named_parameters())
    pipe.close()
    return losses, norms, {name: parameter.detach() for name, parameter in pipe.named_parameters()}


def plain_training() -> tuple[list[float], dict[str, Tensor]]:
    """The same three steps in plain torch, with the norm folded in model order."""
    model = nn.Sequential(*(build() for build in builders(9)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        for x, y in zip(*(part.chunk(4) for part in batch(8, seed=step)), strict=True):
            (token_loss(model(x), y) / 4).backward()
        squares = [parameter.grad.double().square().sum().item() for parameter in model.parameters()]
        norms.append(sum(squares) ** 0.5)
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, CLIP / (norms[-1] + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_training_is_the_same_whatever_the_cut_and_the_schedule(procs: Pool):
    norms, weights = plain_training()
    assert max(norms) > CLIP, "nothing was clipped"
    losses = None
    for world, schedule, chunks in [
        (1, "1f1b", None),
        (2, "gpipe", None),
        (4, "1f1b", None),
        (4, "interleaved-1f1b", 2),
    ]:
        by_rank = procs.run(train, schedule, chunks, world=world)
        losses = losses or by_rank[0][0]
        piped: dict[str, Tensor] = {}
        for got_losses, got_norms, part in by_rank:
            assert (got_losses, got_norms) == (losses, norms)
            piped |= part
        assert same(piped, weights)


def norm_of_3_and_4(rank: int, world: int) -> tuple[float, float]:
    # d loss / d weight is 3 on the first stage and 4 on the second (at weights 4 and 3 and input 1).
    pipe = Pipeline(
        [lambda: Scale(4.0), lambda: Scale(3.0)], loss=lambda y, _: y.mean(), microbatches=1, mesh=init_mesh(pp=2)
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1.0)
    before = next(pipe.named_parameters())[1].item()
    pipe.step(torch.ones(1), torch.ones(1))
    norm = optimizer.step(clip_norm=1.0)
    pipe.close()
    return norm, before - next(pipe.named_parameters())[1].item()


def test_clipping_uses_the_norm_of_all_stages(procs: Pool):
    # Clipping each stage by its own norm would take steps of 1 and 1.
    (norm, first), (_, second) = procs.run(norm_of_3_and_4, world=2)
    assert norm == 5.0
    assert (first, second) == (pytest.approx(3 / 5), pytest.approx(4 / 5))


def stage_without_parameters(rank: int, world: int) -> float:
    pipe = Pipeline([nn.Tanh, lambda: Scale(2.0)], loss=lambda y, _: y.mean(), microbatches=2, mesh=init_mesh(pp=2))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(torch.ones(2), torch.ones(2))
    norm = optimizer.step(clip_norm=1.0)
    pipe.close()
    assert bool(optimizer.param_groups) == (rank == 1)
    return norm


def test_a_rank_without_parameters_steps_along(procs: Pool):
    norms = procs.run(stage_without_parameters, world=2)
    assert norms[0] == norms[1] > 0
