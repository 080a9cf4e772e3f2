"""The rules that are fixed once: who divides, how gradients accumulate, where randomness comes from."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.seeds import mix
from tests.procs import Pool
from tests.runtime.models import CLASSES, WIDTH, batch, builders, same, token_loss, token_loss_sum


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in pipe.named_parameters() if parameter.grad is not None}


def alone(loss=token_loss, m: int = 4, layers=None, **settings) -> Pipeline:
    """All stages in this process."""
    return Pipeline(layers or builders(3), loss=loss, microbatches=m, **settings)


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_gradients_do_not_depend_on_the_number_of_microbatches(m: int):
    pipe, whole = alone(m=m), alone(m=1)
    losses = [p.step(*batch(8)).loss for p in (pipe, whole)]
    torch.testing.assert_close(losses[0], losses[1])
    for name, gradient in gradients(pipe).items():
        torch.testing.assert_close(gradient, gradients(whole)[name])


def test_unequal_microbatches_weigh_by_their_samples():
    # Losses 1..8 in micro-batches of 3, 3, 2: the mean is 4.5, the mean of the three means 4.8333.
    pipe = alone(loss=lambda out, target: target.mean(), m=3, layers=[nn.Identity])
    values = torch.arange(1.0, 9.0)
    assert pipe.evaluate(values, values).loss == pytest.approx(4.5)
    pipe.step(values, values)


def test_sum_and_count_divides_once_by_the_global_count():
    pipe = alone(loss=token_loss_sum)
    result = pipe.step(*batch(8))
    model = nn.Sequential(*(build() for build in builders(3)))
    for x, y in zip(*(part.chunk(4) for part in batch(8)), strict=True):
        token_loss_sum(model(x), y)[0].backward()
    count = batch(8)[1].numel()
    assert result.loss == sum(result.losses) / count
    assert same(gradients(pipe), {name: p.grad / count for name, p in model.named_parameters()})


@pytest.mark.parametrize("loss", [token_loss, token_loss_sum])
def test_accumulating_k_steps_equals_one_step_over_all_of_it(loss):
    pipe, whole = alone(loss=loss), alone(loss=loss, m=8)
    x, y = batch(16)
    for half in (slice(0, 8), slice(8, 16)):
        pipe.step(x[half], y[half], scale=0.5)
    whole.step(x, y)
    for name, gradient in gradients(pipe).items():
        torch.testing.assert_close(gradient, gradients(whole)[name])


def test_a_batch_that_does_not_fit_leaves_the_gradients_of_earlier_steps():
    # With (sum, count) a step put them aside before it looked at its batch, and they were lost with its error.
    pipe = alone(loss=token_loss_sum)
    pipe.step(*batch(8))
    before = gradients(pipe)
    with pytest.raises(PipeSwiftError, match="fewer than"):
        pipe.step(*batch(2))
    assert before
    assert same(gradients(pipe), before)


def test_narrow_gradients_accumulate_in_float32():
    # 1 + 512 * 2^-9 = 2; in bfloat16 every one of the 512 additions would round back to 1.
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    values = torch.cat([torch.ones(1), torch.full((512,), 2.0**-9)]).bfloat16()
    pipe = alone(loss=lambda out, _: (out.sum(), 1), m=513, layers=[Once], schedule="gpipe")
    pipe.step(values, values)
    weights = pipe._weights[0]
    assert weights.gradient("0.weight").item() * 513 == pytest.approx(2.0)


def test_narrow_gradients_accumulate_over_steps_too():
    # What one step had put into .grad for the optimizer was added to the sums again by the next: 3 instead of 2.
    layers = [lambda: nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)]
    pipe = alone(loss=lambda out, _: out.mean(), m=2, layers=layers)
    ones = torch.ones(2, 1, dtype=torch.bfloat16)
    for _ in range(2):
        pipe.step(ones, ones)
    assert gradients(pipe)["0.weight"].item() == 2.0


class Dropped(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


def dropout_run(rank: int, world: int, schedule: str, chunks: int | None) -> dict[str, Tensor]:
    layers = [
        partial(nn.Embedding, CLASSES, WIDTH),
        *(partial(Dropped, i) for i in range(6)),
        partial(nn.Linear, WIDTH, CLASSES),
    ]
    torch.manual_seed(rank)  # what the caller does with the global generator must not matter
    pipe = Pipeline(
        layers, loss=token_loss, schedule=schedule, chunks=chunks, microbatches=4, mesh=init_mesh(pp=world), seed=3
    )
    pipe.step(*batch(8))
    pipe.step(*batch(8))
    pipe.close()
    return gradients(pipe) | {f"initial {name}": p.detach() for name, p in pipe.named_parameters()}


def test_dropout_and_initial_weights_do_not_depend_on_the_cut(procs: Pool):
    runs = []
    for world, schedule, chunks in [
        (1, "gpipe", None),
        (2, "1f1b", None),
        (4, "1f1b", None),
        (2, "interleaved-1f1b", 2),
    ]:
        runs.append({})
        for part in procs.run(dropout_run, schedule, chunks, world=world):
            runs[-1] |= part
    assert all(same(run, runs[0]) for run in runs[1:])


def test_steps_draw_afresh():
    layers = [lambda: nn.Dropout(0.5)]
    pipe = alone(loss=lambda out, _: out.sum(), m=1, layers=layers)
    ones = torch.ones(64, requires_grad=False)
    outputs = [pipe.step(ones, ones, outputs="last").outputs[0] for _ in range(2)]
    assert not torch.equal(*outputs)


def test_seeds_differ_in_every_place():
    seeds = {mix(*ids) for ids in [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2, 1), (1, 2)]}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_evaluation_touches_nothing_of_training():
    pipe, reference = alone(), alone()
    pipe.step(*batch(8))
    reference.step(*batch(8))
    before = gradients(pipe)
    evaluated = pipe.evaluate(*batch(6, seed=9), microbatches=3, outputs="last")
    assert len(evaluated.outputs) == 3
    x, y = batch(6, seed=9)
    model = nn.Sequential(*(build() for build in builders(3)))
    assert evaluated.loss == pytest.approx(cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
    assert same(gradients(pipe), before)
    pipe.step(*batch(8))
    reference.step(*batch(8))
    assert same(gradients(pipe), gradients(reference))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(schedule="1f2b"), "1f1b"),
        (dict(microbatches=None), "microbatches"),
        (dict(microbatches=0), "^microbatches must be at least 1: got microbatches 0"),
        (dict(split={"maks": 0}), "split names 'maks'.*: arguments that some layer names are none"),
        (dict(split={"mask": "first"}), "'first' is no dimension"),
        (dict(layout=[1, 1]), "layout"),
        (dict(layers=[]), "0 layers"),
        (dict(layers=nn.Linear(2, 2)), "nn.Sequential"),
        (dict(layers=[lambda: 3]), "int"),
    ],
)
def test_bad_settings_are_named(arguments: dict, says: str):
    settings = dict(layers=builders(3), loss=token_loss, microbatches=4) | arguments
    with pytest.raises(PipeSwiftError, match=says):
        Pipeline(settings.pop("layers"), **settings)


def test_bad_batches_are_named():
    pipe = alone()
    x, y = batch(8)
    for inputs, targets, says in [
        (x[:3], y[:3], "3 samples"),
        (None, None, "no tensor"),
        ((x, x[:4]), y, r"\[4, 8\]"),
        (x, y[:6], "inputs hold 8 samples and targets 6"),
        ([*x.chunk(4)], y[:6], "micro-batch 2: inputs hold 2 samples and targets 1"),
    ]:
        with pytest.raises(PipeSwiftError, match=says):
            pipe.step(inputs, targets)


def test_a_loss_that_is_no_scalar_is_named():
    pipe = alone(loss=lambda out, _: out)
    with pytest.raises(PipeSwiftError, match=r"shape \[2, 3, 7\] for micro-batch 0"):
        pipe.step(*batch(8))


def unlike(rank: int, world: int) -> str:
    pipe = Pipeline(builders(4), loss=token_loss, microbatches=4, mesh=init_mesh(pp=world))
    with pytest.raises(PipeSwiftError) as error:
        pipe.step(batch(8)[0], batch(6)[1])
    return str(error.value)


def test_inputs_and_targets_of_different_sizes_are_refused_on_every_rank(procs: Pool):
    # They came to an error of the loss function on the last rank, or to a wrong loss.
    says = "inputs hold 8 samples and targets 6 (dimension 0)"
    assert [text.partition(":")[0] for text in procs.run(unlike, world=2)] == [says, says]


def disagree(rank: int, world: int, odd: dict[str, Any]) -> tuple[str, list[str]]:
    """Rank 1 has a setting that others have not: (what it comes to, names of threads that stay)."""
    before = set(threading.enumerate())
    settings: dict[str, Any] = dict(schedule="1f1b", microbatches=4) | (odd if rank == 1 else {})
    with pytest.raises(PipeSwiftError) as error:
        Pipeline(builders(4), loss=token_loss, mesh=init_mesh(pp=world), **settings)
    return str(error.value), [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (dict(schedule="gpipe"), "rank 1 has gpipe"),
        (dict(seed=7), "rank 1 has 7"),
        (dict(microbatches=0), "rank 1: "),
        # Of different buckets the transport made an end of the process, in a step.
        (dict(bucket=16), "ranks disagree on the bucket: rank 0 has 4194304, rank 1 has 16"),
        # These were raised on one rank alone, and left its watchdog at work.
        (dict(bucket=0), "rank 1: bucket = 0 is no whole number from 1"),
        (dict(policy="slow"), "rank 1: policy = 'slow' is none of follow, swift, replan"),
        (dict(in_flight=0, policy="swift"), "rank 1: in_flight = 0 is no whole number from 1"),
        (dict(expert_chunks=0), "rank 1: expert_chunks = 0 is no number of chunks"),
        # These were errors of Python's, which named no setting.
        (dict(split=3), "rank 1: split = 3 is no dict"),
        (dict(tie=3), "rank 1: tie = 3 is no list of groups"),
        (dict(watchdog="soon"), "watchdog = 'soon' is no number of seconds above 0"),
    ],
)
def test_ranks_that_disagree_all_say_so(procs: Pool, odd: dict[str, Any], says: str):
    (text, left), *others = procs.run(disagree, odd, world=3)
    assert others == [(text, left)] * 2
    assert says in text
    assert not left


@pytest.mark.parametrize("cost", [float("nan"), None, 1j, "much"])
def test_a_cost_that_is_no_number_is_named(cost: Any):
    # By a cost that was not a number they entered in some order; others were errors of Python's.
    with pytest.raises(PipeSwiftError, match=r"cost_of gives .* for micro-batch 0: have it return a number"):
        alone(cost_of=lambda inputs: cost).step(*batch(8))
