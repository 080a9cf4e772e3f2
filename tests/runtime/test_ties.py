"""Stages that are on two ranks: one gradient, one norm, and copies that stay equal. Tied weights: see test_general."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipeswift.runtime import Pipeline, init_mesh
from tests.procs import CaseFailed, Pool
from tests.runtime.models import (
    CLASSES,
    WIDTH,
    Block,
    Embed,
    Head,
    batch,
    builders,
    plain_loop,
    same,
    token_loss,
    token_loss_sum,
)

LAYERS = 9
STEPS = 3


class Learned(NamedTuple):
    """What a rank has after some optimizer steps. by_step: its weights after each."""

    losses: list[tuple[float, ...]]
    norms: list[float]
    by_step: list[dict[str, Tensor]]
    evaluated: float | None


def learn(
    rank: int, world: int, schedule: str, microbatches: int, loss: Callable, settings: dict[str, Any], per_step: int = 1
) -> Learned:
    """`per_step` pipeline steps for each optimizer step."""
    layers = settings.pop("layers", None) or builders(LAYERS)
    pipe = Pipeline(
        layers, loss=loss, schedule=schedule, microbatches=microbatches, mesh=init_mesh(pp=world), seed=3, **settings
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    learned = Learned([], [], [], pipe.evaluate(*batch(6), microbatches=3).loss)
    for step in range(STEPS):
        for part in range(per_step):
            inputs, targets = batch(2 * microbatches, seed=10 * step + part)
            learned.losses.append(pipe.step(inputs, targets, scale=1 / per_step).losses)
        learned.norms.append(optimizer.step(clip_norm=0.5))
        learned.by_step.append({name: weight.detach().clone() for name, weight in pipe.named_parameters()})
    pipe.close()
    return learned


def copies_are_equal(by_rank: list[Learned], twice: set[str]) -> None:
    """After each step; `twice` are the names that two ranks hold."""
    for step in range(STEPS):
        seen: dict[str, Tensor] = {}
        shared = set()
        for learned in by_rank:
            for name, weight in learned.by_step[step].items():
                if name in seen:
                    shared.add(name)
                    assert torch.equal(seen[name], weight), (step, name)
                seen[name] = weight
        assert shared == twice


def close_to_1f1b(
    procs: Pool, loss: Callable, settings: dict[str, Any], world: int, per_step: int = 1
) -> list[Learned]:
    """Trains DualPipe and 1F1B alike; the copies of DualPipe's stages are equal after each step."""
    m = 2 * world
    by_rank = procs.run(learn, "dualpipe", m, loss, settings, per_step, world=world)
    (plain,) = procs.run(learn, "1f1b", m, loss, settings, per_step, world=1)
    copies_are_equal(by_rank, set(plain.by_step[0]))
    for learned in by_rank:
        assert learned.losses[:per_step] == plain.losses[:per_step]
        assert learned.evaluated == pytest.approx(plain.evaluated, rel=1e-6)
        assert learned.norms == pytest.approx(plain.norms, rel=1e-4)
        assert learned.norms == by_rank[0].norms
        for name, weight in learned.by_step[-1].items():
            torch.testing.assert_close(weight, plain.by_step[-1][name], rtol=1e-3, atol=1e-4)
    return by_rank


# Regression: each rank trained its own copy, and they drifted apart.
@pytest.mark.parametrize("world", [2, 4])
def test_copies_are_equal_after_each_step(procs: Pool, world: int):
    close_to_1f1b(procs, token_loss, {}, world)


def test_sums_are_divided_once_and_steps_accumulate(procs: Pool):
    close_to_1f1b(procs, token_loss_sum, {}, 2, per_step=2)


def replicated(rank: int, world: int) -> tuple[dict[str, Tensor], float]:
    """Two replicas of DualPipe over two ranks, each with half of a batch."""
    pipe = Pipeline(builders(LAYERS), loss=token_loss, schedule="dualpipe", microbatches=4, mesh=init_mesh(pp=2, dp=2))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.0)
    pipe.step(*(tensor.chunk(2)[pipe.replica] for tensor in batch(16)))
    gradients = {name: weight.grad.clone() for name, weight in pipe.named_parameters() if weight.grad is not None}
    norm = optimizer.step()
    pipe.close()
    return gradients, norm


def test_copies_of_replicas(procs: Pool):
    by_rank = procs.run(replicated, world=4)
    _, expected = plain_loop(builders(LAYERS), *batch(16), 8)
    norm = sum(gradient.double().square().sum().item() for gradient in expected.values()) ** 0.5
    for gradients, found in by_rank:
        assert found == pytest.approx(norm, rel=1e-5)
        assert same(gradients, by_rank[0][0])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_a_tie_over_stages_that_are_on_two_ranks(procs: Pool):
    by_rank = procs.run(learn, "dualpipe", 4, token_loss, {"tie": [["0.weight", "8.weight"]]}, world=2)
    (plain,) = procs.run(learn, "1f1b", 4, token_loss, {"tie": [["0.weight", "8.weight"]]}, world=1)
    for learned in by_rank:
        assert learned.norms == pytest.approx(plain.norms, rel=1e-4)
    first, second = (learned.by_step[-1] for learned in by_rank)
    assert torch.equal(first["0.weight"], second["8.weight"])
    torch.testing.assert_close(first["0.weight"], plain.by_step[-1]["0.weight"], rtol=1e-3, atol=1e-4)


class Idle(Block):
    """A block with a weight that no forward uses, and one that is narrow."""

    def __init__(self, index: int):
        super().__init__(index)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def test_a_weight_without_gradient_stays_without_and_narrow_ones_are_summed_wide(procs: Pool):
    layers = [Embed, *(partial(Idle, index) for index in range(2)), Head]
    by_rank = close_to_1f1b(procs, token_loss, {"layers": layers}, 2)
    assert all(torch.equal(by_rank[0].by_step[-1][name], torch.ones(3)) for name in ("1.unused", "2.unused"))


def unlike(rank: int, world: int) -> None:
    wide = 2 if rank else 1
    layers = [Embed, lambda: nn.Sequential(nn.Linear(WIDTH, wide * WIDTH), nn.Linear(wide * WIDTH, WIDTH)), Head]
    Pipeline(layers, loss=token_loss, schedule="dualpipe", microbatches=4, mesh=init_mesh(pp=world))


def test_copies_that_are_built_unlike_are_refused(procs: Pool):
    with pytest.raises(CaseFailed, match=r"two ranks hold 1\.0\.weight, as \[16, 16\] float32, trained and as"):
        procs.run(unlike, world=2)


def drawn(rank: int, world: int) -> dict[str, Tensor]:
    """Modules that each process has made under a seed of its own."""
    torch.manual_seed(rank)
    layers = [nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]
    pipe = Pipeline(layers, loss=token_loss, schedule="dualpipe", microbatches=4, mesh=init_mesh(pp=world))
    weights = {name: weight.detach() for name, weight in pipe.named_parameters()}
    pipe.close()
    return weights


def test_copies_start_equal_whatever_each_rank_has_drawn(procs: Pool):
    first, second = procs.run(drawn, world=2)
    assert same(first, {name: second[name] for name in first})
