"""Data parallelism: replicas of a pipeline train as one on the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.nn import Dropout
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.trace import COLUMNS, Trace
from tests.procs import Pool
from tests.runtime.models import batch, builders, same, token_loss, token_loss_sum

LAYERS = 6


def pipeline(world: int, pp: int, **options: Any) -> Pipeline:
    settings = {"loss": token_loss, "schedule": "1f1b", "microbatches": 2} | options
    layers = settings.pop("layers", builders(LAYERS))
    return Pipeline(layers, mesh=init_mesh(pp=pp, dp=world // pp), **settings)


def part(pipe: Pipeline, whole: tuple[Tensor, Tensor], sizes: list[int]) -> list[Tensor]:
    """This replica's part of a batch."""
    return [tensor.split(sizes)[pipe.replica] for tensor in whole]


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}


def one_step(rank: int, world: int, pp: int, sizes: list[int], options: dict[str, Any]) -> tuple[float, tuple, dict]:
    pipe = pipeline(world, pp, **options)
    result = pipe.step(*part(pipe, batch(sum(sizes)), sizes))
    found = gradients(pipe)
    pipe.close()
    return result.loss, result.losses, found


def replica_by_replica(sizes: list[int], microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Plain torch: of each replica the sum over its micro-batches, then their sum in the order of replicas."""
    model = nn.Sequential(*(build() for build in builders(LAYERS)))
    losses, total = [], {}
    for inputs, targets in zip(*(tensor.split(sizes) for tensor in batch(sum(sizes))), strict=True):
        model.zero_grad()
        for x, y in zip(inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True):
            loss = token_loss(model(x), y)
            (loss * (len(x) / sum(sizes))).backward()
            losses.append(loss.item())
        for name, parameter in model.named_parameters():
            total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
    return losses, total


@pytest.mark.parametrize(
    ("pp", "sizes", "options"),
    [
        (2, [4, 4], {}),
        (2, [4, 4], {"schedule": "zb-h1", "bucket": 100}),
        (2, [5, 3], {"schedule": "interleaved-1f1b", "chunks": 2, "bucket": 1}),
        (2, [4, 4], {"schedule": "zb-v"}),
        (1, [3, 2, 4], {"bucket": 777}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_gradients_are_the_sum_over_replicas_to_the_bit(procs: Pool, pp: int, sizes: list[int], options: dict):
    losses, expected = replica_by_replica(sizes, 2)
    got = procs.run(one_step, pp, sizes, options, world=pp * len(sizes))
    for rank, (loss, all_losses, mine) in enumerate(got):
        assert list(all_losses) == losses
        assert loss == got[0][0] == pytest.approx(np.average(losses, weights=weights_of(sizes)))
        assert mine
        assert same(mine, {name: expected[name] for name in mine}), rank


def weights_of(sizes: list[int]) -> list[int]:
    """Samples of each micro-batch, two per replica."""
    return [count for size in sizes for count in (-(-size // 2), size // 2)]


CLIP = 0.5
STEPS = 3


def training(
    rank: int, world: int, pp: int, microbatches: int, options: dict[str, Any]
) -> list[tuple[float, float, dict[str, Tensor]]]:
    """(loss, gradient norm, weights) after each step on 8 samples, whoever shares them."""
    pipe = pipeline(world, pp, microbatches=microbatches, **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    history = []
    for step in range(STEPS):
        own = part(pipe, batch(8, seed=step), [8 // pipe.num_replicas] * pipe.num_replicas)
        result = pipe.step(*own)
        norm = optimizer.step(clip_norm=CLIP)
        history.append((result.loss, norm, {n: p.detach().clone() for n, p in pipe.named_parameters()}))
    pipe.close()
    return history


@pytest.mark.parametrize("loss", [token_loss, token_loss_sum])
def test_replicas_stay_equal_and_train_as_one_pipeline_on_the_whole_batch(procs: Pool, loss):
    """Losses and weights of dp = 1 on the same batch and micro-batches, up to the order of one float32 sum.

    The order is ((0 + 1) + (2 + 3)) instead of ((0 + 1) + 2) + 3, so a gradient's last bits differ: a relative 1e-6 of
    its larger terms. AdamW divides by the gradient's size, so a weight differs by at most that share of the learning
    rate 1e-2 per step, save where terms cancel: 1e-5 is far below a step and far above the rounding.
    """
    together = procs.run(training, 2, 2, {"loss": loss}, world=4)
    alone = procs.run(training, 2, 4, {"loss": loss}, world=2)
    for step in range(STEPS):
        losses, norms, weights = zip(*(history[step] for history in together), strict=True)
        assert len(set(losses)) == len(set(norms)) == 1
        assert same(weights[0], weights[1])
        assert same(weights[2], weights[3])
        assert max(norms) > CLIP, "nothing was clipped"
        for stage, history in enumerate(alone):
            loss_alone, norm_alone, weights_alone = history[step]
            assert losses[0] == loss_alone or step, "before the first update no sum is in another order"
            assert losses[0] == pytest.approx(loss_alone, rel=1e-5)
            assert norms[0] == pytest.approx(norm_alone, rel=1e-5)
            for name, weight in weights_alone.items():
                assert torch.allclose(weights[2 * stage][name], weight, rtol=0, atol=1e-5), name


def accumulated(rank: int, world: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    pipe = pipeline(world, 1)
    apart = []
    for seed in (0, 1):
        pipe.step(*part(pipe, batch(8, seed=seed), [4, 4]), scale=0.5)
        apart.append(gradients(pipe))
        pipe.optimizer(torch.optim.SGD, lr=1.0).zero_grad()
    for seed in (0, 1):
        pipe.step(*part(pipe, batch(8, seed=seed), [4, 4]), scale=0.5)
    both = gradients(pipe)
    pipe.close()
    return {name: apart[0][name] + apart[1][name] for name in both}, both


def test_steps_that_accumulate_reduce_only_their_own(procs: Pool):
    for summed, accumulated_ in procs.run(accumulated, world=2):
        assert same(summed, accumulated_)


def dropout_losses(rank: int, world: int, dp: int) -> tuple[float, ...]:
    layers = [*builders(4)[:-1], lambda: nn.Dropout(0.5), lambda: Dropout(0.5), builders(4)[-1]]
    pipe = pipeline(world, world // dp, layers=layers, microbatches=4 // dp)
    losses = pipe.step(*part(pipe, batch(8), [8 // dp] * dp)).losses
    evaluation = pipe.evaluate(*part(pipe, batch(8, seed=9), [8 // dp] * dp))
    pipe.close()
    return (*losses, *evaluation.losses, evaluation.loss)


def test_random_numbers_do_not_depend_on_the_number_of_replicas(procs: Pool):
    alone = procs.run(dropout_losses, 1, world=2)[0]
    assert procs.run(dropout_losses, 2, world=4) == [alone] * 4


def tied(rank: int, world: int) -> tuple[float, dict[str, Tensor]]:
    pipe = pipeline(world, 2, tie=[["0.weight", "5.weight"]])
    pipe.step(*part(pipe, batch(8), [4, 4]))
    found = gradients(pipe)
    norm = pipe.optimizer(torch.optim.SGD, lr=0.1).step()
    pipe.close()
    return norm, {name: found[name] for name in ("0.weight", "5.weight") if name in found}


def test_a_tied_weight_is_reduced_once_and_counts_once(procs: Pool):
    model = nn.Sequential(*(build() for build in builders(LAYERS)))
    model[5].weight = model[0].weight
    for x, y in zip(*(tensor.chunk(4) for tensor in batch(8)), strict=True):
        (token_loss(model(x), y) / 4).backward()
    expected = model[0].weight.grad
    norm = sum(parameter.grad.double().square().sum() for parameter in model.parameters()) ** 0.5
    got = procs.run(tied, world=4)
    copies = [gradient for _, mine in got for gradient in mine.values()]
    assert len(copies) == 4
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert torch.allclose(copies[0], expected, rtol=1e-5, atol=1e-7)
    assert {found for found, _ in got} == {got[0][0]}
    assert got[0][0] == pytest.approx(norm.item(), rel=1e-5)


class Seldom(nn.Module):
    """Has a weight for large inputs and one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.large, self.never = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.always * (self.large if x.max() > 1 else 1)


def seldom(rank: int, world: int) -> dict[str, Tensor]:
    pipe = pipeline(world, 1, layers=[Seldom], loss=lambda y, _: y.sum() / len(y), microbatches=1)
    value = torch.full((1, 2), 2.0 if rank == 1 else 1.0)
    pipe.step(value, value)
    found = gradients(pipe)
    pipe.close()
    return found


def test_a_parameter_that_one_replica_uses_gets_its_gradient_on_all(procs: Pool):
    for found in procs.run(seldom, world=2):
        assert set(found) == {"0.always", "0.large"}
        assert found["0.always"].tolist() == [1.5, 1.5]
        assert found["0.large"].tolist() == [1.0, 1.0]


def narrow(rank: int, world: int) -> tuple[Tensor, Tensor]:
    layer = partial(nn.Linear, 1, 1, bias=False, dtype=torch.bfloat16)
    pipe = pipeline(world, 1, layers=[layer], loss=lambda y, _: y.sum(), microbatches=1)
    value = torch.full((1, 1), [1.0, 2**-9][rank], dtype=torch.bfloat16)
    pipe.step(value, value)
    parameter = next(pipe.named_parameters())[1]
    pipe.close()
    return parameter.grad, pipe._weights[0].gradient("0.weight")


def test_narrow_gradients_are_summed_wide(procs: Pool):
    for published, wide in procs.run(narrow, world=2):
        assert wide.item() == (1 + 2**-9) / 2, "bfloat16 would have lost the smaller one"
        assert torch.equal(published, wide.bfloat16())


def one_replica_overflows(rank: int, world: int) -> tuple[float, bool]:
    pipe = pipeline(world, 1, layers=[partial(nn.Linear, 1, 1)], loss=lambda y, _: y.mean(), microbatches=1)
    before = [parameter.detach().clone() for _, parameter in pipe.named_parameters()]
    value = torch.full((1, 1), float("inf") if rank == 1 else 1.0)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(value, value)
    norm = optimizer.step(clip_norm=1.0)
    kept = all(torch.equal(a, b) for a, (_, b) in zip(before, pipe.named_parameters(), strict=True))
    pipe.close()
    return norm, kept and optimizer.skipped == 1


def test_no_replica_steps_when_one_overflows(procs: Pool):
    for norm, kept in procs.run(one_replica_overflows, world=2):
        assert not np.isfinite(norm)
        assert kept


def refused(rank: int, world: int) -> list[str]:
    said = []
    for options in ({"bucket": 0}, {"schedule": "pipedream"}):
        with pytest.raises(PipeSwiftError) as caught:
            pipeline(world, 1, **options)
        said.append(str(caught.value))
    return said


def test_what_replicas_cannot_do_is_refused_on_all(procs: Pool):
    got = procs.run(refused, world=2)
    assert got[0] == got[1]
    assert got[0][0] == "rank 0: bucket = 0 is no whole number from 1: use 4194304 numbers, say"
    assert "pipedream updates weights inside a step, where dp = 2 replicas do not reduce their gradients" in got[0][1]


def built_apart(rank: int, world: int) -> tuple[Tensor, Tensor, str]:
    torch.manual_seed(rank)
    layers = [nn.Linear(2, 2), nn.BatchNorm1d(2)]
    layers[1].running_mean.fill_(rank)
    pipe = pipeline(world, 1, layers=layers, microbatches=1)
    with pytest.raises(PipeSwiftError) as caught:
        pipeline(world, 1, layers=[nn.Linear(2, 2 + rank)])
    pipe.close()
    return layers[0].weight.detach(), layers[1].running_mean, str(caught.value)


def test_replicas_start_from_the_first_ones_weights_and_refuse_other_shapes(procs: Pool):
    (weight, mean, said), (other, other_mean, other_said) = procs.run(built_apart, world=2)
    assert torch.equal(weight, other)
    assert mean.tolist() == other_mean.tolist() == [0, 0]
    assert said == other_said
    assert "replicas have built different layers: 0.weight is [2, 2] float32, trained on the first and [3, 2]" in said


class Experts(nn.Module):
    """A scale of this rank's own, as experts are."""

    expert_parallel = True

    def __init__(self, scale: float):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def experts(rank: int, world: int) -> tuple[float, dict[str, float], float]:
    mesh = init_mesh(dp=4, ep=2)
    pipe = Pipeline(
        [partial(nn.Linear, 1, 1, bias=False), lambda: Experts(1.0 + rank)],
        loss=lambda y, _: y.sum(),
        microbatches=1,
        mesh=mesh,
    )
    dict(pipe.named_parameters())["0.weight"].data.fill_(1.0)
    pipe.step(torch.tensor([[10.0**rank]]), torch.ones(1))
    found = {name: gradient.item() for name, gradient in gradients(pipe).items()}
    norm = pipe.optimizer(torch.optim.SGD, lr=0.0).step()
    pipe.close()
    return norm, found, dict(pipe.named_parameters())["1.scale"].item()


def test_experts_are_reduced_over_the_replicas_that_hold_the_same_ones(procs: Pool):
    """Replicas 0 and 2 hold one expert, 1 and 3 another; the mean over four replicas divides by 4."""
    got = procs.run(experts, world=4)
    assert [scale for _, _, scale in got] == [1.0, 2.0, 1.0, 2.0], "experts start as their first copy"
    even, odd, dense = (1 + 100) / 4, (10 + 1000) / 4, (1 + 2 * 10 + 100 + 2 * 1000) / 4
    for rank, (norm, found, _) in enumerate(got):
        assert found == {"0.weight": dense, "1.scale": odd if rank % 2 else even}
        assert norm == (dense**2 + even**2 + odd**2) ** 0.5


def traced(rank: int, world: int) -> tuple[Trace, tuple[Trace, ...]]:
    pipe = pipeline(world, 2)
    result = pipe.step(*batch(4))
    traces = pipe.gather_traces(result)
    pipe.close()
    return result.trace, traces


def test_the_traces_of_all_replicas_are_on_one_clock(procs: Pool):
    by_rank = procs.run(traced, world=4)
    traces = by_rank[0][1]
    assert all(same_spans(one, other) for _, theirs in by_rank for one, other in zip(theirs, traces, strict=True))
    zero = min(mine.start.min() for mine, _ in by_rank)
    for number, (mine, _) in enumerate(by_rank):
        rank, replica = divmod(number, 2)
        found = traces[replica].by_rank()[rank]
        assert np.array_equal(found.start, mine.start - zero)
        assert np.array_equal(found.end, mine.end - zero)


def same_spans(one: Trace, other: Trace) -> bool:
    return all(np.array_equal(getattr(one, column), getattr(other, column)) for column in COLUMNS)
