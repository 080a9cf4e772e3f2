"""Experts spread over ranks give the losses and gradients of the unsplit model over all local micro-batches.

Within a tolerance: a weight's gradient is a sum over tokens, and where rows of several ranks meet at an expert, or
gradients of several replicas are added up, that sum has another order. In float32 each of a few hundred terms rounds by
2^-24 of the partial sum at most; measured, gradients differ by less than 1e-6 of a parameter's largest. 1e-5 is asked.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.moe import MoE
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.trace import ALL_TO_ALL, Counter
from tests.moe.models import Settings, builders, expert_block, plain_loop
from tests.procs import CaseFailed, Pool
from tests.runtime.models import Embed, Head, batch, token_loss

TOLERANCE = 1e-5
MICROBATCHES = 3


class Case(NamedTuple):
    settings: Settings
    schedule: str = "1f1b"
    chunks: tuple[int, int] = (1, 1)
    more: dict[str, Any] = {}  # noqa: RUF012  settings of the pipeline


CASES = [
    Case({}),
    Case({"shared": 6}, "zb-h1"),
    Case({"experts": 8, "top_k": 1, "scoring": "sigmoid"}, "zb-h1", (2, 1)),
    Case({"experts": 8, "shared": 6}, "1f1b", (1, 2)),
    Case({"experts": 8, "placement": "random"}, "zb-h2", (2, 2), {"batched_weight_gradients": True}),
    Case({"favourite": 2, "top_k": 1}),  # all tokens on one expert, and three experts without a token
    Case({"favourite": 0, "top_k": 1, "experts": 8}, "zb-h1", (2, 2)),
]


class Trained(NamedTuple):
    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    norm: float
    figures: dict[str, Any]
    lanes: list[int]
    counters: tuple[Counter, ...]


def train(rank: int, world: int, pp: int, ep: int, case: Case) -> Trained:
    mesh = init_mesh(pp=pp, ep=ep)
    pipe = Pipeline(
        builders(case.settings),
        loss=token_loss,
        schedule=case.schedule,
        microbatches=MICROBATCHES,
        mesh=mesh,
        expert_chunks=case.chunks,
        **case.more,
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    result = pipe.step(*replica_batch(rank % ep))
    gradients = {name: weight.grad.clone() for name, weight in pipe.named_parameters() if weight.grad is not None}
    figures = pipe.gather_figures(result)
    norm = optimizer.step()
    assert pipe.evaluate(*replica_batch(rank % ep)).loss is not None
    exchanges: list[Any] = [exchange for stage in pipe.stages.values() for exchange in stage.exchanges]
    assert not any(exchange._transits for exchange in exchanges), "a micro-batch's rows outlive it"
    pipe.close()
    return Trained(result.losses, gradients, norm, figures, result.trace.lane.tolist(), result.trace.counters)


def replica_batch(replica: int) -> tuple[Tensor, Tensor]:
    return batch(2 * MICROBATCHES, seed=5 + replica)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("pp", "ep"), [(2, 2), (1, 4)])
def test_losses_and_gradients_are_those_of_the_unsplit_model(procs: Pool, pp: int, ep: int, case: Case):
    by_rank: list[Trained] = procs.run(train, pp, ep, case, world=pp * ep)
    batches = [replica_batch(replica) for replica in range(ep)]
    losses, gradients = plain_loop(builders(case.settings), batches, MICROBATCHES)
    found: dict[str, Tensor] = {}
    for trained in by_rank:
        assert trained.losses == pytest.approx(losses, rel=1e-6)
        assert ALL_TO_ALL in trained.lanes
        for name, gradient in trained.gradients.items():
            assert torch.equal(found.setdefault(name, gradient), gradient), "replicas have one gradient"
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        largest = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=TOLERANCE * largest)
    norm = sum(gradient.double().square().sum().item() for gradient in gradients.values()) ** 0.5
    assert {trained.norm for trained in by_rank} == {by_rank[0].norm}
    assert by_rank[0].norm == pytest.approx(norm, rel=1e-5)


def test_a_narrow_payload_halves_what_dispatches_send_and_rounds_what_experts_see(procs: Pool):
    batches = [replica_batch(replica) for replica in range(2)]
    expected, _ = plain_loop(builders({}), batches, MICROBATCHES)
    full, narrow = (procs.run(train, 1, 2, Case({"payload": payload}), world=2)[0] for payload in ("full", "bfloat16"))
    for name, figures in narrow.figures.items():
        assert figures.sums["sent"] == figures.sums["saved"] == full.figures[name].sums["sent"] / 2 > 0
        assert full.figures[name].sums["saved"] == 0
    assert narrow.losses != full.losses
    assert narrow.losses == pytest.approx(expected, rel=2**-8), "bfloat16 has 8 bits"
    for name, gradient in narrow.gradients.items():
        assert (gradient - full.gradients[name]).abs().max() < 0.05 * full.gradients[name].abs().max(), name


def twice(rank: int, world: int, expert_chunks: Any, schedule: str) -> tuple[dict[str, Tensor], Any, Any]:
    """Two steps, whose gradients add up: (gradients, grains, information in the second one's trace)."""
    pipe = Pipeline(
        builders({"experts": 8, "shared": 6}),
        loss=token_loss,
        schedule=schedule,
        microbatches=MICROBATCHES,
        mesh=init_mesh(pp=1, ep=2),
        expert_chunks=expert_chunks,
    )
    results = [pipe.step(*replica_batch(rank)) for _ in range(2)]
    pipe.evaluate(*replica_batch(rank))
    pipe.close()
    gradients = {name: weight.grad for name, weight in pipe.named_parameters() if weight.grad is not None}
    return gradients, pipe.grains, results[1].trace.info


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_chunks_may_be_found_by_measurement(procs: Pool, schedule: str):
    expected = procs.run(twice, 1, schedule, world=2)
    for chunks in ((4, 2), "auto"):
        found = procs.run(twice, chunks, schedule, world=2)
        assert found[0][1] == found[1][1], "ranks that share out experts agree"
        for (gradients, grains, info), (others, *_) in zip(found, expected, strict=True):
            assert gradients.keys() == others.keys()
            for name, gradient in gradients.items():
                largest = max(gradient.abs().max().item(), 1e-3)
                torch.testing.assert_close(gradient, others[name], rtol=0, atol=TOLERANCE * largest)
            (grain,) = grains.values()
            assert (grain.costs is not None) == (chunks == "auto")
            assert 1 <= min(grain.forward, grain.backward) <= max(grain.forward, grain.backward) <= 4
            assert info == {"chunks of experts, stage 0": f"{grain.forward} forward, {grain.backward} backward"}


def test_all_tokens_on_one_expert_are_counted_there(procs: Pool):
    case = CASES[5]
    for trained in procs.run(train, 2, 2, case, world=4):
        loads = {counter.name.partition(": ")[2]: counter.value.tolist() for counter in trained.counters}
        own = 2 * 3  # samples x length of a micro-batch of one replica
        chosen = {f"rows {expert}": [own * (expert == 2)] * MICROBATCHES for expert in range(4)}
        assert loads == chosen | {f"taken {rank}": [own * (rank == 1)] * MICROBATCHES for rank in range(2)}
        for figures in trained.figures.values():
            rows = figures.sums["rows"].tolist()
            assert rows[2] == sum(rows) == 2 * 2 * MICROBATCHES * 3, "replicas x samples x length"
            assert figures.means["balance"] > 3


def inside_another_layer(rank: int, world: int) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = expert_block(0, {})

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)

    Pipeline([Embed, Hidden, Head], loss=token_loss, microbatches=2, mesh=init_mesh(pp=1, ep=2))


def test_experts_inside_another_layer_are_refused_on_every_rank(procs: Pool):
    with pytest.raises(CaseFailed) as failed:
        procs.run(inside_another_layer, world=2)
    assert all("in its part 'part.1'" in error for error in failed.value.errors.values())
    assert len(failed.value.errors) == 2


def too_few_experts(rank: int, world: int) -> str:
    try:
        Pipeline(builders({"experts": 3}), loss=token_loss, microbatches=2, mesh=init_mesh(pp=1, ep=2))
    except PipeSwiftError as error:
        return str(error)
    return ""


def test_experts_that_do_not_spread_evenly_are_refused(procs: Pool):
    for text in procs.run(too_few_experts, world=2):
        assert "3 experts do not spread evenly over ep = 2 ranks" in text


class Sleepy(nn.Module):
    """Sleeps at random, forward and backward."""

    def __init__(self, seed: int):
        super().__init__()
        self.random = random.Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.random.random() * 0.004)
        if x.requires_grad:
            x.register_hook(lambda _: time.sleep(self.random.random() * 0.004))
        return x


def restless(rank: int, world: int, steps: int) -> list[float]:
    pipe = Pipeline(
        [partial(Sleepy, rank), *builders({"experts": 4, "top_k": 1}), partial(Sleepy, 100 + rank)],
        loss=token_loss,
        schedule="zb-h1",
        microbatches=4,
        mesh=init_mesh(pp=2, ep=2),
        dynamic_shapes=True,
        expert_chunks=2,
        watchdog=30.0,
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    lengths = random.Random(rank % 2)
    losses = []
    for step in range(steps):
        sizes = [(1, lengths.choice((1, 2, 40))) for _ in range(4)]
        batches = [batch(*size, seed=step) for size in sizes]
        result = pipe.step([inputs for inputs, _ in batches], [targets for _, targets in batches])
        assert result.loss is not None
        losses.append(result.loss)
        optimizer.step(clip_norm=1.0)
    pipe.close()
    return losses


@pytest.mark.slow
def test_very_different_token_counts_and_random_sleeps_never_hang_or_mismatch(procs: Pool):
    """200 steps of micro-batches of 1 to 40 tokens, different on every replica, with sleeps in every pass."""
    by_rank = procs.run(restless, 200, world=4, timeout=300.0)
    assert all(losses == by_rank[0] for losses in by_rank)
    assert all(loss == loss for loss in by_rank[0])


def test_a_few_restless_steps(procs: Pool):
    by_rank = procs.run(restless, 5, world=4)
    assert all(losses == by_rank[0] for losses in by_rank)


def test_a_layer_without_a_pipeline_has_all_its_experts():
    layer = MoE(8, experts=4, hidden=6)
    assert layer.placement.ranks == 1
    assert layer(torch.randn(2, 3, 8)).shape == (2, 3, 8)
