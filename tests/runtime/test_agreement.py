"""Swift over expert groups, on real processes: members agree, and gradients are the static run's, bit for bit."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipeswift.ir import Schedule
from pipeswift.policy import Alarm, Calibration, Swift
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.trace import COMPUTE, Trace, whole_passes
from tests.moe.models import expert_block
from tests.procs import Pool
from tests.runtime.models import Embed, Head, batch, same, token_loss

CALM = Calibration(seconds={}, swing={0: 0.0})
UNMOVED = Alarm(threshold=1e9)  # follows the hint whatever happens


class Dawdler(nn.Module):
    """Takes its time, forward and backward: another one for every micro-batch, and on every rank."""

    def __init__(self, milliseconds: float, seed: int):
        super().__init__()
        self._draw, self._seconds = random.Random(seed), milliseconds / 1e3

    def forward(self, x: Tensor) -> Tensor:
        self._dawdle()
        if x.requires_grad:
            x.register_hook(lambda _: self._dawdle())
        return x

    def _dawdle(self) -> None:
        time.sleep(self._seconds * self._draw.expovariate(1.0))


def dawdling_block(index: int, milliseconds: float, rank: int, settings: dict[str, Any]) -> nn.Sequential:
    """A block with experts, after which its rank sleeps at random."""
    return nn.Sequential(Dawdler(milliseconds, 100 * rank + index), *expert_block(index, settings))


class Case(NamedTuple):
    schedule: str
    pp: int = 2
    dp: int = 2
    microbatches: int = 4
    stages: int = 2
    in_flight: int | None = None
    chunks: int = 1
    settings: dict[str, Any] = {"experts": 4, "top_k": 1}  # noqa: RUF012  of the layers with experts
    more: dict[str, Any] = {}  # noqa: RUF012  of the pipeline

    @property
    def world(self) -> int:
        return self.pp * self.dp


class Trained(NamedTuple):
    losses: list[tuple[float, ...]]
    gradients: dict[str, Tensor]  # of the last step
    order: list[tuple[int, int, int]]  # the passes of the last step, as they started
    trace: Trace  # of the last step, all ranks of this pipeline


def train(rank: int, world: int, case: Case, policy: Any, steps: int = 3, milliseconds: float = 2.0) -> Trained:
    torch.set_num_threads(1)
    blocks = [partial(dawdling_block, i, milliseconds, rank, case.settings) for i in range(case.stages)]
    pipe = Pipeline(
        [Embed, *blocks, Head],
        layout=[2, *[1] * (case.stages - 2), 2],
        loss=token_loss,
        schedule=case.schedule,
        microbatches=case.microbatches,
        mesh=init_mesh(pp=case.pp, dp=case.dp, ep=2),
        policy=policy,
        in_flight=case.in_flight if policy != "follow" else None,
        expert_chunks=case.chunks,
        watchdog=30.0,
        **case.more,
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    losses, gradients, trace = [], {}, None
    for step in range(steps):
        result = pipe.step(*batch(2 * case.microbatches, seed=10 * step + rank % case.dp))
        losses.append(result.losses)
        gradients = {name: weight.grad.clone() for name, weight in pipe.named_parameters() if weight.grad is not None}
        trace = pipe.gather_trace(result)
        optimizer.step()
    assert trace is not None
    assert pipe.evaluate(*batch(2 * case.microbatches)).loss is not None
    pipe.close()
    return Trained(losses, gradients, order_of(trace, rank // case.dp), trace)


def order_of(trace: Trace, rank: int) -> list[tuple[int, int, int]]:
    spans = whole_passes(trace).on(rank, COMPUTE)
    return list(zip(spans.stage.tolist(), spans.op.tolist(), spans.microbatch.tolist(), strict=True))


def swift(in_flight: int | None, hint: Schedule) -> Swift:
    """Swift that decides from the first step."""
    slots = None if in_flight is None else {(stage, 0): in_flight for stage in range(hint.num_stages)}
    return Swift(hint, slots)


CASES = [
    Case("1f1b", in_flight=3),
    Case("zb-h1"),
    Case("zb-h1", in_flight=4, chunks=2),
    Case("interleaved-1f1b", stages=4, in_flight=3),
    Case("zb-v", stages=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_the_static_run(procs: Pool, case: Case):
    static = procs.run(train, case, "follow", 3, 0.0, world=case.world)
    found: list[Trained] = procs.run(train, case, partial(swift, case.in_flight), world=case.world)
    for one, other in zip(static, found, strict=True):
        assert one.losses == other.losses
        assert same(one.gradients, other.gradients)
    for leader in range(0, case.world, 2):
        assert found[leader].order == found[leader + 1].order
