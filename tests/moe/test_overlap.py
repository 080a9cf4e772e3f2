"""A forward and a backward woven into each other: the bits of one after the other, and one order of collectives."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipeswift import schedules
from pipeswift.ir import Op, Order, Schedule
from pipeswift.program import Work
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.trace import ALL_TO_ALL
from tests.moe.models import Settings, builders
from tests.procs import Pool
from tests.runtime.models import batch, same, token_loss

MICROBATCHES, STEPS = 4, 4  # pairs are woven on nominal costs in two steps, then on measured ones


class Case(NamedTuple):
    schedule: str
    settings: Settings
    chunks: tuple[int, int] = (1, 1)


CASES = [
    Case("1f1b-overlap", {"shared": 6}),
    Case("dualpipe-v", {}),
    Case("dualpipe-v", {"experts": 8, "shared": 6, "top_k": 1}, (2, 4)),
    Case("dualpipe", {"experts": 8}, (2, 1)),
]


def parted(schedule: Schedule) -> Schedule:
    """The same passes in the same order, the parts of a pair one after the other."""
    return replace(schedule, orders=tuple(Order.of(order.actions()) for order in schedule.orders))


def schedule_of(name: str, woven: bool) -> Schedule:
    made = schedules.build(name, 2, MICROBATCHES, None)
    return made if woven else parted(made)


class Trained(NamedTuple):
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    spans: list[tuple[int, int, int, int]]  # of the first step: (op, stage, micro-batch, lane), as they started


def train(rank: int, world: int, case: Case, woven: bool) -> Trained:
    pipe = Pipeline(
        builders(case.settings, blocks=3),
        loss=token_loss,
        schedule=schedule_of(case.schedule, woven),
        mesh=init_mesh(pp=2, ep=2),
        expert_chunks=case.chunks,
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    losses, gradients, trace = [], {}, None
    for step in range(STEPS):
        optimizer.zero_grad()
        result = pipe.step(*batch(2 * MICROBATCHES, seed=10 * step + rank % 2))
        losses += result.losses
        gradients |= {f"{step} {name}": w.grad.clone() for name, w in pipe.named_parameters() if w.grad is not None}
        trace = trace or result.trace
        optimizer.step()
    exchanges: list[Any] = [exchange for stage in pipe.stages.values() for exchange in stage.exchanges]
    assert not any(exchange._transits for exchange in exchanges), "a micro-batch's rows outlive it"
    pipe.close()
    weights = {name: weight.detach().clone() for name, weight in pipe.named_parameters()}
    assert trace is not None
    columns = (trace.op, trace.stage, trace.microbatch, trace.lane)
    return Trained(losses, gradients, weights, list(zip(*(column.tolist() for column in columns), strict=True)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_give_the_bits_of_one_pass_after_the_other(procs: Pool, case: Case):
    woven: list[Trained] = procs.run(train, case, True, world=4)
    apart: list[Trained] = procs.run(train, case, False, world=4)
    for one, other in zip(woven, apart, strict=True):
        assert one.losses == other.losses
        assert same(one.gradients, other.gradients)
        assert same(one.weights, other.weights)
        assert turns(one.spans) > turns(other.spans), "woven on nominal costs, passes take turns"


def turns(spans: list[tuple[int, int, int, int]]) -> int:
    """How often another pass than the one before computes."""
    passes = [tuple(of) for *of, lane in spans if lane != ALL_TO_ALL and of[0] in (Op.F, Op.B)]
    return sum(one != other for one, other in pairwise(passes))


def disturb(exchange: Any, draw: random.Random) -> None:
    """Each of its works sleeps at random before it runs, on the host as well as on the lane."""
    run = exchange.run

    def late(work: Work, microbatch: int) -> None:
        time.sleep(draw.random() * 0.002)
        run(work, microbatch)

    exchange.run = late


def restless(rank: int, world: int, steps: int) -> list[float]:
    layers, schedule = builders({"top_k": 1}, blocks=3), schedule_of("dualpipe-v", True)
    pipe = Pipeline(layers, loss=token_loss, schedule=schedule, mesh=init_mesh(pp=2, ep=2), watchdog=30.0)
    for stage in pipe.stages.values():
        for exchange in stage.exchanges:
            disturb(exchange, random.Random(10 * stage.index + rank))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(steps):
        result = pipe.step(*batch(MICROBATCHES, seed=10 * step + rank % 2))
        assert result.loss is not None
        losses.append(result.loss)
        optimizer.step(clip_norm=1.0)
    pipe.close()
    return losses


@pytest.mark.parametrize("steps", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_steps_with_random_sleeps_finish(procs: Pool, steps: int):
    by_rank = procs.run(restless, steps, world=4, timeout=400.0)
    assert all(losses == by_rank[0] for losses in by_rank)
    assert all(loss == loss for loss in by_rank[0])
