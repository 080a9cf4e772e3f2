"""Stages on several ranks train without flush as one process would by the published rules, written here again."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.passes import split_backward
from pipeswift.policy import Follow
from pipeswift.program import Lane
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.schedules import pipedream
from pipeswift.simulate import replay
from pipeswift.versions import WeightPolicy, versions, with_versions
from tests.procs import Pool
from tests.runtime.models import batch, builders, same, token_loss
from tests.runtime.test_asynchronous import CLIP

LAYERS = 5
UPDATES = 16


class Case(NamedTuple):
    """copies: ranks per stage. deferred: I and W apart."""

    copies: tuple[int, ...]
    every: int
    policy: WeightPolicy = "stash"
    deferred: bool = False

    @property
    def microbatches(self) -> int:
        return UPDATES * self.every

    @property
    def schedule(self) -> Schedule:
        made = pipedream(sum(self.copies), self.microbatches, self.copies)
        return split_backward(made) if self.deferred else made


CASES = [
    Case((2, 1), 2),
    Case((2, 1), 2, deferred=True),
    Case((2, 1), 4, "2bw"),
    Case((2, 1), 4, "vertical"),
    Case((1, 2), 2),
    Case((1, 2), 2, "vertical"),
    Case((2, 2), 2),
    Case((3, 1), 3),
    Case((1, 2, 1), 2),
    Case((2, 2), 4, "vertical"),
    Case((2, 2), 4, "2bw"),
]


class Learned(NamedTuple):
    """What training leaves; weights by update, those before the first included. norms: of the last step's updates."""

    weights: list[dict[str, Tensor]]
    losses: list[float]
    norms: list[float]


# The reference: one process, no pipeline, no code of the package.


def version_used(case: Case, stage: int, i: int) -> int:
    """1F1B-RR: F number k of a rank follows its backward number k - NOAM, and so many of its backwards end an update
    as are its share of one."""
    if case.policy == "2bw":
        return max(i // case.every - 1, 0)
    at = 0 if case.policy == "vertical" else stage
    mine = case.copies[at]
    noam = ceil(sum(case.copies[at:]) / mine)
    return max(i // mine - noam + 1, 0) // (case.every // mine)


def reference(case: Case, steps: int) -> Learned:
    layers = [build() for build in builders(LAYERS)]
    cuts = np.array_split(np.arange(LAYERS), len(case.copies))
    stages = [nn.ModuleDict({str(i): layers[i] for i in cut}) for cut in cuts]
    scratch = [[copy.deepcopy(stage) for _ in range(n)] for stage, n in zip(stages, case.copies, strict=True)]
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=3e-3) for stage in stages]
    every_weight, losses, norms = [whole(stages)], [], []
    for step in range(steps):
        history = [[copy.deepcopy(stage.state_dict())] for stage in stages]
        norms = []
        parts = (part.chunk(case.microbatches) for part in batch(2 * case.microbatches, seed=step))
        for i, (value, y) in enumerate(zip(*parts, strict=True)):
            for s, replicas in enumerate(scratch):
                replica = replicas[i % len(replicas)]
                replica.load_state_dict(history[s][version_used(case, s, i)])
                for layer in replica.values():
                    value = layer(value)
            loss = token_loss(value, y)
            (loss / case.every).backward()
            losses.append(loss.item())
            if (i + 1) % case.every == 0:
                squares = [update(*parts) for parts in zip(stages, scratch, optimizers, strict=True)]
                norms.append(sum(squares) ** 0.5)
                every_weight.append(whole(stages))
                for s, stage in enumerate(stages):
                    history[s].append(copy.deepcopy(stage.state_dict()))
    return Learned(every_weight, losses, norms)


def update(stage: nn.Module, replicas: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> float:
    """One step with the replicas' gradients, added in their order; the square of their norm before it is clipped."""
    for parameter, first, *others in zip(stage.parameters(), *(r.parameters() for r in replicas), strict=True):
        parameter.grad = first.grad.clone()
        for other in others:
            parameter.grad += other.grad
    square = 0.0
    for parameter in stage.parameters():
        assert parameter.grad is not None
        square += parameter.grad.double().square().sum().item()
    for parameter in stage.parameters():
        assert parameter.grad is not None
        parameter.grad *= min(1.0, CLIP / (square**0.5 + 1e-6))
    optimizer.step()
    for replica in replicas:
        replica.zero_grad()
    return square


def whole(stages: list[nn.ModuleDict]) -> dict[str, Tensor]:
    return {name: tensor.clone() for stage in stages for name, tensor in stage.state_dict().items()}


# The pipeline.


class Dawdling(nn.Module):
    """A layer that takes a time of its own on every rank and for every micro-batch."""

    def __init__(self, build: Callable[[], nn.Module], seed: int):
        super().__init__()
        self.layer, self._random = build(), np.random.default_rng(seed)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._random.uniform(0, 0.01))
        return self.layer(x)


def train(rank: int, world: int, every_case: list[Case], steps: int = 1) -> list[tuple[Learned, list[int], int]]:
    """By case (what this rank saw, its live versions over time, the number of sums that it took part in)."""
    mesh = init_mesh(pp=world)
    outcomes = []
    for number, case in enumerate(every_case):
        layers = builders(LAYERS)
        if not number:
            layers[2] = partial(Dawdling, layers[2], rank)
        pipe = Pipeline(
            layers,
            loss=token_loss,
            schedule=case.schedule,
            mesh=mesh,
            weights=case.policy,
            updates_every=case.every,
        )
        seen: list[dict[str, Tensor]] = []

        def look(update: Any = None, pipe: Pipeline = pipe, seen: list[dict[str, Tensor]] = seen) -> float:
            seen.append({n.replace(".layer.", "."): w.detach().clone() for n, w in pipe.named_parameters()})
            return 3e-3

        optimizer = pipe.async_optimizer(torch.optim.AdamW, clip_norm=CLIP, lr=3e-3, rate=look)
        results = [pipe.step(*batch(2 * case.microbatches, seed=step)) for step in range(steps)]
        look()
        learned = Learned(seen, [loss for result in results for loss in result.losses], optimizer.gradient_norms())
        trace = results[0].trace
        counted = trace.counters[0].value.tolist()
        outcomes.append((learned, counted, int((trace.lane == Lane.ALL_TO_ALL).sum())))
        pipe.close()
    return outcomes


@pytest.mark.parametrize("world", [3, 4])
def test_copies_follow_the_published_rules_bit_for_bit_at_every_update(procs: Pool, world: int):
    cases = [case for case in CASES if sum(case.copies) == world]
    by_rank = procs.run(train, cases, world=world)
    for number, case in enumerate(cases):
        expected = reference(case, steps=1)
        order, costs = case.schedule, Costs.uniform(len(case.copies))
        simulated = with_versions(replay(order, costs), order, versions(order, case.policy, case.every))
        for rank, (learned, counted, sums) in enumerate(part[number] for part in by_rank):
            assert_equal(learned, expected)
            assert counted == simulated.counters[rank].value.tolist()
            assert sums == (UPDATES if case.copies[order.stages_on(rank)[0][1]] > 1 else 0)


def assert_equal(learned: Learned, expected: Learned) -> None:
    """Whether a rank had the reference's weights at every moment, as far as it holds them."""
    assert len(learned.weights) == len(expected.weights)
    for mine, theirs in zip(learned.weights, expected.weights, strict=True):
        assert same(mine, {name: theirs[name] for name in mine})
    assert learned.losses == expected.losses
    assert learned.norms == pytest.approx(expected.norms, rel=1e-12)


def test_the_next_step_goes_on_from_there(procs: Pool):
    case = Case((2, 1), 2)
    for part in procs.run(train, [case], 2, world=3):
        assert_equal(part[0][0], reference(case, steps=2))


def test_copies_stay_equal_without_versions(procs: Pool):
    (first, *_), (second, *_), _ = (part[0] for part in procs.run(train, [Case((2, 1), 4, "none")], world=3))
    assert all(same(*pair) for pair in zip(first.weights, second.weights, strict=True))


def decided_elsewhere(rank: int, world: int) -> str:
    with pytest.raises(PipeSwiftError) as caught:
        Pipeline(
            builders(LAYERS), loss=token_loss, schedule=pipedream(world, 4, (2, 1)), updates_every=2,
            policy=Follow, mesh=init_mesh(pp=world),
        )  # fmt: skip
    return str(caught.value)


def test_a_policy_that_may_leave_the_order_is_refused(procs: Pool):
    for text in procs.run(decided_elsewhere, world=3):
        assert "a policy of your own may leave the order of pipedream" in text
