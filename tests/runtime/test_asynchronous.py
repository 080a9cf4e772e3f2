"""Asynchronous training equals the published update rules with delayed gradients, written here a second time."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import F, I, Schedule, W
from pipeswift.runtime import Pipeline, Update, init_mesh, shelf
from pipeswift.runtime.loss import LossError
from pipeswift.schedules import pipedream, zb_h1
from pipeswift.simulate import replay
from pipeswift.versions import WeightPolicy, versions, with_versions
from tests.procs import Pool
from tests.runtime.models import Block, batch, builders, same, token_loss, token_loss_sum

LAYERS = 5
UPDATES = 40
CLIP = 1.5


class Checkpointed(Block):
    """A block that keeps nothing but its input, and runs its forward again in the backward."""

    def __init__(self, index: int, reentrant: bool):
        super().__init__(index)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self._reentrant)  # pyright: ignore[reportReturnType]


class Case(NamedTuple):
    """One way to train. blocks: as usual, or checkpointed. deferred: W apart from I, in ZB-H1's order."""

    policy: WeightPolicy
    every: int = 1
    blocks: str = "plain"
    deferred: bool = False
    optimizer: str = "adamw"

    def schedule(self, p: int) -> Schedule:
        m = UPDATES * self.every
        return replace(zb_h1(p, m), flush=False) if self.deferred else pipedream(p, m)

    def make_optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        return partial(torch.optim.AdamW, lr=3e-3) if self.optimizer == "adamw" else partial(torch.optim.SGD, lr=0.1)


def cases(p: int) -> list[Case]:
    return [
        *(Case(policy) for policy in ("stash", "vertical")),
        Case("2bw", every=p),
        Case("stash", every=2, optimizer="sgd"),
        *(Case(policy, deferred=True) for policy in ("stash", "vertical")),
        Case("2bw", every=p, deferred=True),
        Case("stash", blocks="reentrant"),
        *(
            Case(policy, blocks="checkpointed", deferred=deferred)
            for policy in ("stash", "vertical")
            for deferred in (False, True)
        ),
        *(Case("2bw", every=p, blocks="checkpointed", deferred=deferred) for deferred in (False, True)),
    ]


def layers_of(case: Case) -> list[Callable[[], nn.Module]]:
    layers = builders(LAYERS)
    if case.blocks != "plain":
        layers[1:-1] = [partial(Checkpointed, i, case.blocks == "reentrant") for i in range(LAYERS - 2)]
    return layers


# The reference: one process, no pipeline, no code of the package.


def version_used(case: Case, p: int, stage: int, i: int) -> int:
    """The published rules; with `deferred`, W lags by `stage`, and so does every update."""
    if case.policy == "2bw":
        return max(i // case.every - 1, 0)
    behind = 0 if case.policy == "vertical" or case.deferred else stage
    return max(i - p + 1 + behind, 0) // case.every


def reference(case: Case, p: int, steps: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """(final weights, losses), micro-batch after micro-batch: a gradient at old weights, applied to the newest."""
    layers = [build() for build in builders(LAYERS)]
    cut = np.array_split(np.arange(LAYERS), p)
    stages = [nn.ModuleDict({str(layer): layers[layer] for layer in mine}) for mine in cut]
    scratch = copy.deepcopy(stages)  # what gradients are taken on
    optimizers = [case.make_optimizer()(stage.parameters()) for stage in stages]
    losses = []
    for step in range(steps):
        history = [[copy.deepcopy(stage.state_dict())] for stage in stages]
        parts = (part.chunk(UPDATES * case.every) for part in batch(2 * UPDATES * case.every, seed=step))
        for i, (value, y) in enumerate(zip(*parts, strict=True)):
            for s, stage in enumerate(scratch):
                stage.load_state_dict(history[s][version_used(case, p, s, i)])
                for layer in stage.values():
                    value = layer(value)
            loss = token_loss(value, y)
            (loss / case.every).backward()
            losses.append(loss.item())
            if (i + 1) % case.every == 0:
                for s, stage in enumerate(stages):
                    update(stage, scratch[s], optimizers[s])
                    history[s].append(copy.deepcopy(stage.state_dict()))
    return {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}, losses


def update(stage: nn.Module, scratch: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradients = [parameter.grad for parameter in scratch.parameters()]
    total = 0.0
    for gradient in gradients:
        total += gradient.double().square().sum().item()
    for parameter, gradient in zip(stage.parameters(), gradients, strict=True):
        parameter.grad = gradient * min(1.0, CLIP / (total**0.5 + 1e-6))
    optimizer.step()
    scratch.zero_grad()


# The pipeline.


class Watch:
    """Counts versions by weak references to one of their tensors: what is alive, not what somebody says is."""

    def __init__(self) -> None:
        self._alive: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __enter__(self) -> Watch:
        self._original = shelf.Version

        def version(master: Any) -> shelf.Version:
            made = self._original(master)
            self._alive.append(weakref.ref(next(iter(made.leaves.values()))))
            self.peak = max(self.peak, self.count())
            return made

        shelf.Version = version  # type: ignore[assignment, misc]
        return self

    def __exit__(self, *error: object) -> None:
        shelf.Version = self._original  # type: ignore[misc]

    def count(self) -> int:
        return sum(reference() is not None for reference in self._alive)


class Outcome(NamedTuple):
    weights: dict[str, Tensor]
    losses: list[float]
    peak: int  # live versions on this rank, by weak references
    left: int  # those that outlive the step
    counted: list[int]  # what the trace says over time


def train(rank: int, world: int, every_case: list[Case], steps: int = 1) -> list[Outcome]:
    mesh = init_mesh(pp=world)
    outcomes = []
    for case in every_case:
        pipe = Pipeline(
            layers_of(case),
            loss=token_loss,
            schedule=case.schedule(world),
            mesh=mesh,
            weights=case.policy,
            updates_every=case.every,
        )
        pipe.async_optimizer(case.make_optimizer(), clip_norm=CLIP)
        with Watch() as watch:
            results = [pipe.step(*batch(2 * UPDATES * case.every, seed=step)) for step in range(steps)]
        losses = [loss for result in results for loss in result.losses]
        weights = {name: parameter.detach() for name, parameter in pipe.named_parameters()}
        counted = results[0].trace.counters[0].value.tolist()
        outcomes.append(Outcome(weights, losses, watch.peak, watch.count(), counted))
        pipe.close()
    return outcomes


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_published_rules_bit_for_bit(procs: Pool, p: int):
    every_case = cases(p)
    by_rank = procs.run(train, every_case, world=p)
    expected = {}
    for number, case in enumerate(every_case):
        rule = case._replace(blocks="plain")  # checkpointing changes no number
        if rule not in expected:
            expected[rule] = reference(rule, p)
        outcomes = [part[number] for part in by_rank]
        assert equal(outcomes, *expected[rule]), case
        order = case.schedule(p)
        simulated = with_versions(replay(order, Costs.uniform(p)), order, versions(order, case.policy, case.every))
        for outcome, counter in zip(outcomes, simulated.counters, strict=True):
            assert outcome.counted == counter.value.tolist(), case
            assert outcome.peak == max(outcome.counted), case
            assert outcome.left == 0, "versions outlive the step"


def equal(outcomes: list[Outcome], weights: dict[str, Tensor], losses: list[float]) -> bool:
    """Whether all ranks together ended with those weights, and all saw those losses."""
    piped: dict[str, Tensor] = {}
    for outcome in outcomes:
        piped |= outcome.weights
    return same(piped, weights) and all(outcome.losses == losses for outcome in outcomes)


def test_the_next_step_starts_from_the_newest_weights(procs: Pool):
    case = Case("stash")
    outcomes = [part[0] for part in procs.run(train, [case], 2, world=2)]
    assert equal(outcomes, *reference(case, 2, steps=2))


def test_live_versions(procs: Pool):
    p = 4
    peaks = {}
    for case in (Case("stash"), Case("vertical"), Case("2bw", every=p)):
        peaks[case.policy] = [outcomes[0].peak for outcomes in procs.run(train, [case], world=p)]
    assert peaks == {"stash": [4, 3, 2, 1], "vertical": [4, 4, 4, 4], "2bw": [2, 2, 2, 2]}


# What goes wrong without versions.


class Linear(nn.Linear):
    def __init__(self, index: int):
        torch.manual_seed(index)
        super().__init__(5, 5, bias=False)


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train_without_versions(rank: int, world: int, m: int, split: bool) -> dict[str, Tensor]:
    schedule = replace(zb_h1(world, m), flush=False) if split else pipedream(world, m)
    pipe = Pipeline(
        [partial(Linear, i) for i in range(world)],
        loss=square,
        schedule=schedule,
        mesh=init_mesh(pp=world),
        weights="none",
    )
    pipe.async_optimizer(torch.optim.SGD, lr=0.05)
    pipe.step(torch.linspace(-1, 1, 10 * m).view(2 * m, 5), torch.zeros(2 * m, 5))
    pipe.close()
    return {name: parameter.detach() for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("split", [False, True])
def test_none_goes_back_through_the_newest_weights(procs: Pool, split: bool):
    p, m = 3, 20
    weights = [Linear(i).weight.detach() for i in range(p)]
    history = [[weight.clone()] for weight in weights]
    for i, x in enumerate(torch.linspace(-1, 1, 10 * m).view(2 * m, 5).split(2)):
        seen = [x]
        for stage in range(p):
            behind = 0 if split else stage
            seen.append(seen[-1] @ history[stage][max(i - p + 1 + behind, 0)].t())
        gradient = 2 * seen[-1] / seen[-1].numel()
        for stage in reversed(range(p)):
            # Where W lags by `stage`, so do the updates that the newest weights have seen.
            newest = history[stage][max(i - stage, 0) if split else i]
            left = gradient.t() @ seen[stage]
            gradient = gradient @ newest
            history[stage].append(history[stage][-1] - 0.05 * left)
    piped: dict[str, Tensor] = {}
    for part in procs.run(train_without_versions, m, split, world=p):
        piped |= part
    for stage in range(p):
        torch.testing.assert_close(piped[f"{stage}.weight"], history[stage][-1])


# One stage is never late: asynchronous training is then ordinary training.


def alone(**settings: Any) -> Pipeline:
    return Pipeline(builders(4), loss=token_loss, schedule="pipedream", microbatches=6, **settings)


def test_a_pipeline_of_one_trains_as_usual():
    pipe = alone(updates_every=2)
    pipe.async_optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(*batch(12))
    model = nn.Sequential(*(build() for build in builders(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(zip(*(part.chunk(6) for part in batch(12)), strict=True)):
        (token_loss(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert same(dict(pipe.named_parameters()), dict(model.named_parameters()))
    pipe.close()


def train_plainly(module: nn.Module, inputs: Tensor) -> None:
    """An update after each of four micro-batches."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x in inputs.chunk(4):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)[0]


@pytest.mark.parametrize(
    "build",
    [
        lambda: Recurrent(6, 6, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        lambda: torch.jit.script(nn.Linear(6, 6)),
        lambda: nn.TransformerEncoderLayer(6, 2, dropout=0.0, batch_first=True),
        lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.BatchNorm1d(3)),
    ],
    ids=["flat weights", "parametrised", "TorchScript", "attention", "buffers"],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_keep_their_weights_in_unusual_places(build: Callable[[], nn.Module]):
    module, plain = build(), build()
    plain.load_state_dict(module.state_dict())
    pipe = Pipeline([module], loss=lambda y, _: y.square().mean(), schedule="pipedream", microbatches=4)
    pipe.async_optimizer(torch.optim.SGD, lr=0.1)
    inputs = torch.linspace(-1, 1, 144).view(8, 3, 6)
    pipe.step(inputs, inputs)
    train_plainly(plain, inputs)
    assert same(module.state_dict(), plain.state_dict())
    pipe.close()


class Mirrored(nn.Linear):
    """Uses its weight three times, once in a way that no rule covers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).tanh() @ self.weight.t())


def test_a_weight_covered_in_part_is_found_in_every_version():
    module, plain = Mirrored(6, 6), Mirrored(6, 6)
    plain.load_state_dict(module.state_dict())
    passes = [op(0, i) for i in range(4) for op in (F, I, W)]
    schedule = replace(Schedule.one_route(lambda _: passes, ranks=1, microbatches=4, name="I apart"), flush=False)
    pipe = Pipeline([module], loss=lambda y, _: y.square().mean(), schedule=schedule)
    pipe.async_optimizer(torch.optim.SGD, lr=0.1)
    inputs = torch.linspace(-1, 1, 144).view(8, 3, 6)
    pipe.step(inputs, inputs)
    train_plainly(plain, inputs)
    assert same(module.state_dict(), plain.state_dict())
    pipe.close()


def test_the_mean_of_an_update_is_over_its_samples():
    pipe = alone(updates_every=3)
    optimizer = pipe.async_optimizer(torch.optim.SGD, lr=0.0)
    inputs, targets = batch(12)
    sizes = [1, 2, 3, 1, 4, 1]
    pipe.step(list(inputs.split(sizes)), list(targets.split(sizes)))
    model = nn.Sequential(*(build() for build in builders(4)))
    norms = []
    for half in (slice(0, 6), slice(6, 12)):
        model.zero_grad()
        token_loss(model(inputs[half]), targets[half]).backward()
        norms.append(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item())
    assert optimizer.gradient_norms() == pytest.approx(norms)
    pipe.close()


def test_narrow_parameters_sum_in_float32():
    pipe = Pipeline(
        [lambda: Linear(0).bfloat16()], loss=lambda y, _: y.float().sum(), schedule="pipedream", microbatches=3,
        updates_every=3,
    )  # fmt: skip
    pipe.async_optimizer(torch.optim.SGD, lr=1.0)
    before = next(pipe.named_parameters())[1].detach().clone()
    pipe.step([torch.full((1, 5), x, dtype=torch.bfloat16) for x in (257.0, 0.75, 0.75)], [torch.zeros(1)] * 3)
    # Each gradient is a third of its input; in bfloat16 the sum would round at every step.
    thirds = sum(torch.tensor(x / 3, dtype=torch.bfloat16).float() for x in (256.0, 0.75, 0.75))
    assert isinstance(thirds, Tensor)
    assert torch.equal(next(pipe.named_parameters())[1], before - thirds.bfloat16())
    pipe.close()


def test_every_update_asks_for_its_rate():
    asked: list[Update] = []
    pipe = alone(updates_every=2)
    optimizer = pipe.async_optimizer(torch.optim.SGD, lr=1.0, rate=lambda update: asked.append(update) or 0.0)
    before = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    for _ in range(2):
        pipe.step(*batch(12))
    assert asked == [Update(stage=0, number=number, staleness=0.0) for number in range(6)]
    assert same(dict(pipe.named_parameters()), before)
    assert optimizer.updates == {0: 6}
    pipe.close()


def test_a_non_finite_gradient_skips_its_update_only():
    pipe = alone()
    optimizer = pipe.async_optimizer(torch.optim.SGD, lr=0.1)
    poisoned = list(pipe.stages[0].layers())[1]
    calls: list[int] = []
    poisoned.register_forward_hook(lambda *a: calls.append(1) or (a[2] * float("inf") if len(calls) == 2 else None))
    pipe.step(*batch(12))
    assert optimizer.skipped == 1
    assert all(parameter.isfinite().all() for _, parameter in pipe.named_parameters())
    pipe.close()


def test_evaluation_between_steps_is_on_the_newest_weights():
    pipe = alone()
    pipe.async_optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(*batch(12))
    model = nn.Sequential(*(build() for build in builders(4)))
    model.load_state_dict(dict(pipe.named_parameters()))
    losses = [token_loss(model(x), y).item() for x, y in zip(*(part.chunk(3) for part in batch(6)), strict=True)]
    assert list(pipe.evaluate(*batch(6), microbatches=3).losses) == losses
    pipe.close()


# What is refused, and why.


def test_what_does_not_fit_is_refused():
    with pytest.raises(PipeSwiftError, match="weights = 'stash' is for schedules that update within a step, and 1f1b"):
        Pipeline(builders(4), loss=token_loss, microbatches=4, weights="stash")
    with pytest.raises(PipeSwiftError, match="updates_every = 4 does not divide the 6 micro-batches"):
        alone(updates_every=4)
    with pytest.raises(PipeSwiftError, match="batched_weight_gradients = True joins W of several micro-batches"):
        alone(batched_weight_gradients=True)
    pipe = alone()
    with pytest.raises(PipeSwiftError, match=r"make its optimizer with pipe\.async_optimizer"):
        pipe.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(PipeSwiftError, match="make its optimizer before"):
        pipe.step(*batch(12))
    with pytest.raises(PipeSwiftError, match="clip_norm = -1"):
        pipe.async_optimizer(torch.optim.SGD, lr=0.1, clip_norm=-1.0)
    pipe.close()
    flushing = Pipeline(builders(4), loss=token_loss, microbatches=4)
    with pytest.raises(PipeSwiftError, match=r"1f1b flushes before it updates: .* pipe\.optimizer"):
        flushing.async_optimizer(torch.optim.SGD, lr=0.1)
    flushing.close()


def test_a_hook_on_a_weight_is_refused():
    hooked = Linear(0)
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(PipeSwiftError, match=r"parameter 0\.weight has a hook on its gradient"):
        Pipeline([hooked], loss=square, schedule="pipedream", microbatches=2)


def test_a_loss_with_a_count_is_refused():
    pipe = Pipeline(builders(4), loss=token_loss_sum, schedule="pipedream", microbatches=2)
    pipe.async_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(LossError, match="do not learn the count of an update in time"):
        pipe.step(*batch(4))
    pipe.close()


def tied_over_stages(rank: int, world: int) -> str:
    with pytest.raises(PipeSwiftError) as caught:
        Pipeline(
            builders(4), loss=token_loss, schedule="pipedream", microbatches=4, mesh=init_mesh(pp=world),
            tie=[("0.weight", "3.weight")],
        )  # fmt: skip
    return str(caught.value)


def test_ties_over_stages_are_refused_with_the_reason(procs: Pool):
    for text in procs.run(tied_over_stages, world=2):
        assert "tied weights 0.weight, 3.weight are on stages 0, 1" in text
        assert "no moment when one weight could get the gradients of all" in text


def test_a_tie_within_a_stage_is_one_weight_in_every_version():
    pipe = alone(tie=[("0.weight", "3.weight")])
    pipe.async_optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(*batch(12))
    embed, *_, head = pipe.stages[0].layers()
    assert embed.weight is head.weight
    assert len(dict(pipe.named_parameters())) == len(dict(pipe.stages[0].named_parameters())) - 1
    pipe.close()
