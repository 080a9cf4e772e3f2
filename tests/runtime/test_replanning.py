"""Replan on real processes: all ranks follow one new order, and the gradients are those of the static run."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op, Schedule
from pipeswift.runtime import Pipeline, init_mesh, replanning
from pipeswift.runtime.replanning import Account, combined
from pipeswift.search import replan as search
from pipeswift.trace import PLANS, Trace, whole_passes
from tests.moe.models import expert_block
from tests.procs import Pool
from tests.runtime.models import Block, Embed, Head, batch, builders, plain_loop, same, token_loss

MICROBATCHES = 4
SECONDS = 0.02


class Sleeper(Block):
    """A block whose F and backward each take at least so many seconds."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SECONDS)
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(SECONDS))
        return y


def orders_of(trace: Trace) -> list[tuple[int, ...]]:
    """(stage, op, micro-batch) as they ran on the one rank of a trace."""
    passes = whole_passes(trace)
    return list(zip(passes.stage.tolist(), passes.op.tolist(), passes.microbatch.tolist(), strict=True))


def rows_of(schedule: Schedule, rank: int) -> list[tuple[int, ...]]:
    return [tuple(row) for row in schedule.orders[rank].rows.tolist()]


def gradients_of(pipe: Pipeline) -> dict[str, Tensor]:
    """Takes them away."""
    gradients = {name: weight.grad for name, weight in pipe.named_parameters() if weight.grad is not None}
    for _, weight in pipe.named_parameters():
        weight.grad = None
    return gradients


def measuring(rank: int, world: int) -> np.ndarray:
    """The seconds that the first plan is made for; the model's first half sleeps."""
    asked: list[np.ndarray] = []

    def find(schedule: Schedule, costs: Costs, *limits: object) -> Schedule:
        asked.append(costs.seconds)
        return schedule

    pipe = Pipeline(
        [Embed, partial(Sleeper, 0), partial(Block, 1), Head],
        loss=token_loss,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        mesh=init_mesh(pp=world),
        policy="replan",
    )
    with patch.object(replanning, "replanned", find):
        for _ in range(2):
            pipe.step(*batch(2 * MICROBATCHES))
    pipe.close()
    (seconds,) = asked
    return seconds


def test_all_ranks_plan_for_what_passes_took_on_each(procs: Pool):
    one, other = procs.run(measuring, world=2)
    assert np.array_equal(one, other, equal_nan=True)
    assert one.shape == (4, 2, 1)
    assert np.isnan(one[[Op.I, Op.W]]).all()
    assert (one[[Op.F, Op.B], 0] >= SECONDS).all()
    assert (one[[Op.F, Op.B], 1] > 0).all()


def telling(seconds: np.ndarray) -> Callable[..., Account]:
    """In place of `account_of`: all micro-batches alike, links without latency."""
    return lambda *facts: Account(seconds[..., None], np.zeros(seconds.shape, dtype=np.bool_), span=0.0, loads={})


def test_where_ranks_meet_the_last_to_come_counts_and_elsewhere_the_slowest():
    def account(meets: bool, *seconds: float) -> Account:
        return Account(np.array(seconds).reshape(1, 1, -1), np.array([[meets]]), span=0.0, loads={})

    nan = float("nan")
    apart = [account(False, 1, 4), account(False, 2, 3), account(False, nan, nan)]
    assert combined(apart, experts=1).tolist() == [[[2, 4]]]
    together = [account(True, 1, 4), account(True, 2, 3), account(True, 5, 1), account(True, 4, nan)]
    assert combined(together, experts=2).tolist() == [[[4, 3]]]


class Step(NamedTuple):
    """plans: made before it."""

    order: list[tuple[int, ...]]
    plans: int
    gradients: dict[str, Tensor]


def slowing_down(rank: int, world: int, ep: int) -> list[Step]:
    """Six steps. From the fourth on, those of stage 0 say that its passes take three times as long."""
    blocks = [partial(expert_block, index, {}) if ep > 1 else partial(Block, index) for index in range(2)]
    pipe = Pipeline(
        [Embed, *blocks, Head],
        loss=token_loss,
        schedule="gpipe",
        microbatches=MICROBATCHES,
        mesh=init_mesh(pp=world // ep, ep=ep),
        expert_chunks=2,
        policy="replan",
    )
    steps = []
    for number in range(6):
        seconds = np.full((4, 2), np.nan)
        seconds[[Op.F, Op.B], pipe.rank] = [3, 6] if pipe.rank == 0 and number >= 3 else [1, 2]
        with patch.object(replanning, "account_of", telling(seconds)):
            trace = pipe.step(*batch(2 * MICROBATCHES, seed=pipe.replica)).trace
        (plans,) = (int(counter.value[-1]) for counter in trace.counters if counter.name == PLANS)
        steps.append(Step(orders_of(trace), plans, gradients_of(pipe)))
    pipe.close()
    return steps


@pytest.mark.parametrize("ep", [1, 2])
def test_behind_a_slow_stage_all_ranks_take_another_order_and_gradients_stay_bit_for_bit(procs: Pool, ep: int):
    own, other = (schedules.build(name, 2, MICROBATCHES) for name in ("gpipe", "1f1b"))
    by_process = procs.run(slowing_down, ep, world=2 * ep)
    for process, steps in enumerate(by_process):
        rank = process // ep
        assert [step.order for step in steps[:4]] == [rows_of(own, rank)] * 4
        assert [step.plans for step in steps] == [0, 0, 1, 1, 2, 3], "one for steady times"
        assert steps[-1].order != rows_of(own, rank)
        assert rank == 0 or steps[-1].order == rows_of(other, rank)
        for step in steps:
            assert same(step.gradients, steps[0].gradients)
    for first, second in zip(by_process[::ep], by_process[ep - 1 :: ep], strict=True):
        assert [step.order for step in first] == [step.order for step in second], "ranks that share experts"


def restless(rank: int, world: int, name: str) -> list[tuple[bool, dict[str, Tensor]]]:
    """(whether its order is not the schedule's, gradients) of five steps. After each, passes seem to take other times,
    and whatever a search finds is followed."""
    pipe = Pipeline(
        builders(2 * world + 1),
        loss=token_loss,
        schedule=name,
        microbatches=MICROBATCHES,
        mesh=init_mesh(pp=world),
        policy="replan",
        in_flight=MICROBATCHES,
    )
    draws = np.random.default_rng(0).lognormal(sigma=1.0, size=(5, 4, pipe.schedule.num_stages))
    found = []
    for seconds in draws:
        told = patch.object(replanning, "account_of", telling(seconds))
        with told, patch.object(search, "WORTH", -1.0):
            order = orders_of(pipe.step(*batch(2 * MICROBATCHES)).trace)
        found.append((order != rows_of(pipe.schedule, rank), gradients_of(pipe)))
    pipe.close()
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_whatever_the_order_gradients_are_those_of_a_plain_loop(procs: Pool, name: str):
    _, gradients = plain_loop(builders(5), *batch(2 * MICROBATCHES), MICROBATCHES)
    steps = list(zip(*procs.run(restless, name, world=2), strict=True))
    for (_, first), (_, second) in steps:
        assert same(first | second, gradients)
    assert any(new for step in steps for new, _ in step)


def disagreeing(rank: int, world: int) -> str:
    """Rank 1 finds an order of its own."""
    pipe = Pipeline(
        builders(4),
        loss=token_loss,
        schedule="gpipe",
        microbatches=MICROBATCHES,
        mesh=init_mesh(pp=world),
        policy="replan",
    )
    alone = schedules.build("1f1b" if rank == 1 else "gpipe", world, MICROBATCHES)
    with patch.object(replanning, "replanned", lambda *facts: alone):
        pipe.step(*batch(2 * MICROBATCHES))
        try:
            pipe.step(*batch(2 * MICROBATCHES))
        except PipeSwiftError as error:
            return str(error)
        finally:
            pipe.close()
    return ""


def test_ranks_that_find_different_orders_all_say_so(procs: Pool):
    one, other = procs.run(disagreeing, world=2)
    assert one == other
    assert one.startswith("ranks disagree on the plan for the next step: rank 0 has ")


def test_one_rank_has_nothing_to_plan():
    pipe = Pipeline([nn.Linear(2, 2)], loss=lambda y, t: y.sum(), microbatches=2, policy="replan", in_flight=2)
    *_, result = [pipe.step(torch.ones(4, 2), torch.ones(4)) for _ in range(3)]
    assert [counter.value[-1] for counter in result.trace.counters if counter.name == PLANS] == [1]
    pipe.close()


def test_a_step_of_more_microbatches_than_the_limit_is_refused():
    # GPipe holds them all; only the pipeline's own number was looked at.
    pipe = Pipeline(
        [nn.Linear(2, 2)],
        loss=lambda y, t: y.sum(),
        schedule="gpipe",
        microbatches=2,
        policy="replan",
        in_flight=2,
    )
    with pytest.raises(PipeSwiftError, match="in_flight = 2 is less than the 4 micro-batches that some stage holds"):
        pipe.step(torch.ones(4, 2), torch.ones(4), microbatches=4)
    pipe.close()
