"""Which gradients are reduced together, and when."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from pipeswift import schedules
from pipeswift.ir import Action, Op
from pipeswift.rehearse.kernels import Emulated
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.cuts import build_stage
from pipeswift.runtime.groups import Group, Replicas
from pipeswift.runtime.reduction import Bucket, buckets_of, done_order
from pipeswift.runtime.weights import Weights
from pipeswift.trace import ALL_TO_ALL, Trace
from tests.procs import Pool

DENSE, COPIES = Group(0, 4), Group(0, 2)
REPLICAS = Replicas(0, 4, gradients=DENSE, expert_replicas=COPIES)


def names(buckets: list[Bucket]) -> list[list[str]]:
    return [[member.name for member in bucket.members] for bucket in buckets]


def one_stage(layers: list[nn.Module], elements: int, experts: tuple[str, ...] = ()) -> list[Bucket]:
    stage = build_stage(0, dict(enumerate(layers)), Group(), (1, 1), torch.device("cpu"))
    weights = Weights(stage.named_parameters(), experts)
    return buckets_of([0], {0: stage}, [weights], REPLICAS, elements)[0]


def test_a_bucket_takes_parameters_until_it_is_full():
    layers = [nn.Linear(3, 5), nn.Linear(5, 2), nn.LayerNorm(2)]  # 15 + 5, 10 + 2, 2 + 2 elements
    assert names(one_stage(layers, 20)) == [["0.weight", "0.bias"], ["1.weight", "1.bias", "2.weight", "2.bias"]]
    assert names(one_stage(layers, 14)) == [["0.weight"], ["0.bias"], ["1.weight", "1.bias", "2.weight"], ["2.bias"]]
    assert names(one_stage(layers, 1)) == [[name] for bucket in names(one_stage(layers, 99)) for name in bucket]


def test_dtypes_and_experts_have_buckets_of_their_own_and_what_is_frozen_none():
    layers = [nn.Linear(1, 1, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.complex64, None)]
    layers[3].weight.requires_grad_(False)
    buckets = one_stage(layers, 100, experts=("1.bias",))
    assert names(buckets) == [["0.weight", "0.bias"], ["1.weight", "2.weight", "2.bias", "3.bias"], ["1.bias"]]
    assert [bucket.group for bucket in buckets] == [DENSE, DENSE, COPIES]
    assert [bucket.number for bucket in buckets] == [0, 1, 2]


def test_a_weight_that_two_stages_of_a_rank_share_goes_when_both_are_done():
    order = done_order(schedules.build("zb-v", 2, 4, None), 0)
    assert order == [3, 0]
    shared = nn.Linear(2, 2)
    stages = {index: build_stage(index, {index: shared}, Group(), (1, 1), torch.device("cpu")) for index in (0, 3)}
    owner, other = Weights(stages[3].named_parameters()), Weights([])
    due = buckets_of(order, stages, [other, owner], REPLICAS, 100)
    assert {stage: names(buckets) for stage, buckets in due.items()} == {3: [], 0: [["3.weight", "3.bias"]]}


def slow_step(rank: int, world: int, schedule: str) -> tuple[Trace, list[str], list[str]]:
    pipe = Pipeline(
        [partial(Emulated, 5, F=0.02, I=0.02, W=0.02) for _ in range(4)],
        loss=lambda y, _: y.mean(),
        schedule=schedule,
        microbatches=3,
        mesh=init_mesh(pp=2, dp=2),
        bucket=5,
    )
    trace = pipe.gather_trace(pipe.step(torch.ones(3, 5), torch.ones(3, 5)))
    planned = [name for buckets in pipe._reducer.buckets.values() for bucket in names(list(buckets)) for name in bucket]
    mine = [name for name, _ in pipe.named_parameters()]
    pipe.close()
    return trace, planned, mine


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_reduces_each_parameter_once(procs: Pool, schedule: str):
    for trace, planned, mine in procs.run(slow_step, schedule, world=4):
        assert planned == mine
        reductions = trace.only(trace.lane == ALL_TO_ALL)
        columns = (reductions.stage, reductions.op, reductions.microbatch)
        actions = [str(Action(stage, Op(op), n)) for stage, op, n in zip(*map(np.ndarray.tolist, columns), strict=True)]
        assert sorted(actions) == ["0W0", "0W1", "1W0", "1W1"]
        assert trace.on(0, ALL_TO_ALL).start.min() >= trace.on(0).end.max()


def test_the_last_stage_reduces_while_the_first_has_a_backward_to_run(procs: Pool):
    """
    rank 0   F F B F B . . . B r r
    rank 1     F B F B F B r r
    """
    for trace, _, _ in procs.run(slow_step, "1f1b", world=4):
        assert trace.on(1).end.max() <= trace.on(1, ALL_TO_ALL).start.min() < trace.on(0).end.max()
