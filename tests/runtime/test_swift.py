"""Swift on real processes: whatever it decides, the gradients are those of the static run, bit for bit."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeswift import schedules
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op
from pipeswift.policy import Alarm, Calibration, Swift, source_order
from pipeswift.policy.diary import tally
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.lookout import MESSAGES
from pipeswift.trace import QUEUE_DEPTH
from tests.runtime.models import Block, Embed, Head, batch, builders, plain_loop, same, token_loss

CALM = Calibration(seconds={}, swing={0: 0.0})
UNMOVED = Alarm(threshold=1e9)  # follows the hint whatever happens


class Dawdler(Block):
    """A block whose forward takes its time, another one for every micro-batch; its backward too."""

    def __init__(self, index: int, milliseconds: float):
        super().__init__(index)
        self._draw = np.random.default_rng(index)
        self._seconds = milliseconds / 1e3

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds * self._draw.exponential())
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(self._seconds * self._draw.exponential()))
        return y


class Frozen(Block):
    """A block that stands still for a while in one of its forwards."""

    def __init__(self, index: int, call: int, seconds: float):
        super().__init__(index)
        self._left, self._seconds = call, seconds

    def forward(self, x: Tensor) -> Tensor:
        self._left -= 1
        time.sleep(self._seconds if self._left == 0 else 0.002)
        return super().forward(x)


def dawdlers(layers: int, milliseconds: float = 2.0) -> list:
    return [Embed, *(partial(Dawdler, index, milliseconds) for index in range(layers - 2)), Head]


def swinging(rank: int, world: int, name: str, microbatches: int, in_flight: int | None) -> list:
    """Two steps with Swift from the first: (gradients, counters, in-flight peak by stage) of each."""
    torch.set_num_threads(1)
    found = []
    mesh = init_mesh(pp=world)
    inputs, targets = batch(2 * microbatches)
    pipe = Pipeline(
        dawdlers(2 * world + 1),
        loss=token_loss,
        schedule=name,
        microbatches=microbatches,
        mesh=mesh,
        policy=lambda hint: Swift(
            hint, None if in_flight is None else {(s, 0): in_flight for s in range(hint.num_stages)}
        ),
        in_flight=in_flight,
    )
    for _ in range(2):
        result = pipe.step(inputs, targets)
        trace = pipe.gather_trace(result)
        gradients = {key: parameter.grad.clone() for key, parameter in pipe.named_parameters()}
        found.append((result.losses, gradients, trace))
        for parameter in pipe.named_parameters():
            parameter[1].grad = None
    pipe.close()
    return found


@pytest.mark.parametrize(
    ("name", "world", "microbatches", "in_flight"),
    [
        ("1f1b", 3, 6, 3),
        ("zb-h1", 3, 6, None),
        ("zb-h1", 3, 6, 1),
        ("zb-h2", 2, 5, 4),
        ("interleaved-1f1b", 2, 4, 3),
        ("zb-v", 2, 4, None),
    ],
)
def test_gradients_are_those_of_a_plain_loop(procs, name, world, microbatches, in_flight):
    losses, gradients = plain_loop(dawdlers(2 * world + 1, 0.0), *batch(2 * microbatches), microbatches)
    schedule = schedules.build(name, world, microbatches)
    for step in zip(*procs.run(swinging, name, microbatches, in_flight, world=world), strict=True):
        found: dict[str, Tensor] = {}
        for theirs, mine, _ in step:
            assert list(theirs) == losses
            found |= mine
        assert same(found, gradients)
        trace = step[0][2]
        assert len(trace) == schedule.num_actions
        if in_flight is not None:
            assert max(in_flight_peaks(trace)) <= in_flight


def in_flight_peaks(trace) -> list[int]:
    """For each stage, the most micro-batches between the start of F and the end of W or B."""
    peaks = []
    for stage in np.unique(trace.stage):
        spans = trace.only(trace.stage == stage)
        opens = spans.start[spans.op == Op.F]
        closes = spans.end[np.isin(spans.op, (Op.W, Op.B))]
        moments = sorted([(at, 1) for at in opens] + [(at, -1) for at in closes])
        peaks.append(int(np.cumsum([change for _, change in moments]).max()))
    return peaks


def test_the_trace_tells_of_decisions_and_of_messages(procs):
    (_, _, trace), _ = procs.run(swinging, "zb-h1", 6, None, world=3)[0]
    rules = tally(trace.counters, 3)
    assert set(rules) <= {"follow", "advance", "hold", "starve", "force"}
    started = [sum(rules[rule][rank] for rule in ("follow", "advance", "force") if rule in rules) for rank in range(3)]
    assert all(count >= 18 for count in started)  # 6 micro-batches of F, I, W
    assert {counter.rank for counter in trace.counters if counter.name == QUEUE_DEPTH} == {0, 1, 2}
    sent = {counter.rank: counter.value[-1] for counter in trace.counters if counter.name == MESSAGES}
    assert sent == {0: 18, 1: 36, 2: 18}  # one per action and neighbour


def frozen(rank: int, world: int) -> dict[str, list[int]]:
    layers = [Embed, partial(Block, 0), partial(Frozen, 1, call=3, seconds=2.0), Head]
    pipe = Pipeline(
        layers,
        loss=token_loss,
        schedule="zb-h1",
        microbatches=8,
        mesh=init_mesh(pp=world),
        policy=lambda hint: Swift(hint, {(0, 0): 8, (1, 0): 8}, calibration=CALM, alarm=UNMOVED),
        in_flight=8,
    )
    trace = pipe.gather_trace(pipe.step(*batch(16)))
    pipe.close()
    return tally(trace.counters, world)


def test_a_frozen_stage_makes_others_force_what_is_ready(procs):
    assert procs.run(frozen, world=2)[0]["force"][0] > 0


def calibrated(rank: int, world: int) -> tuple[bool, list[bool]]:
    """Whether all steps gave the same gradients, and in which of them Swift decided."""
    pipe = Pipeline(
        dawdlers(5, 1.0), loss=token_loss, schedule="zb-h1", microbatches=4, mesh=init_mesh(pp=world), policy="swift"
    )
    decided, gradients = [], []
    for _ in range(4):
        result = pipe.step(*batch(8))
        decided.append(bool(result.trace.counters))
        gradients.append({key: parameter.grad for key, parameter in pipe.named_parameters()})
        for _, parameter in pipe.named_parameters():
            parameter.grad = None
    pipe.close()
    return all(same(gradients[0], later) for later in gradients), decided


def test_by_name_it_follows_until_it_is_calibrated(procs):
    assert procs.run(calibrated, world=2) == [(True, [False, False, True, True])] * 2


def limited(rank: int, world: int) -> list[int]:
    """The most micro-batches that this rank's stage holds, in each of four steps."""
    pipe = Pipeline(
        builders(4),
        loss=token_loss,
        schedule="zb-h1",
        microbatches=4,
        mesh=init_mesh(pp=world),
        policy="swift",
        in_flight=1,
    )
    peaks = [in_flight_peaks(pipe.step(*batch(8)).trace) for _ in range(4)]
    pipe.close()
    return [most for (most,) in peaks]


def test_a_limit_below_the_hints_own_holds_from_the_first_step(procs):
    # It followed the hint for two steps, which holds two.
    assert procs.run(limited, world=2) == [[1, 1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "slow"}, r"policy = 'slow' is none of follow, swift, replan: use swift"),
        ({"policy": "swift", "in_flight": 0}, r"in_flight = 0 is no whole number from 1"),
        ({"in_flight": 3}, r"in_flight = 3 limits a policy that adapts: leave it out, or use policy swift or replan"),
        ({"policy": "swift", "schedule": "pipedream"}, r"policy swift needs a schedule that flushes: pipedream"),
        ({"policy": "replan", "schedule": "1f1b-overlap"}, r"policy replan cannot part woven pairs: 1f1b-overlap"),
    ],
)
def test_what_cannot_be_steered_is_refused(settings, message):
    with pytest.raises(PipeSwiftError, match=message):
        Pipeline(
            [nn.Linear(2, 2)],
            loss=lambda output, target: output.sum(),
            microbatches=2,
            **{"schedule": "1f1b"} | settings,
        )


def test_a_function_has_to_return_a_policy():
    nothing: Any = lambda hint: None  # noqa: E731
    pipe = Pipeline([nn.Linear(2, 2)], loss=lambda output, target: output.sum(), microbatches=1, policy=nothing)
    with pytest.raises(PipeSwiftError, match=r"returned None for 1f1b: it has to return a Policy"):
        pipe.step(torch.ones(1, 2), torch.ones(1, 2))
    pipe.close()


LENGTHS = (3, 7, 2, 5, 6, 4)


def unequal() -> tuple[list[Tensor], list[Tensor]]:
    """Ready-made micro-batches of sequences of different lengths."""
    inputs, targets = zip(*(batch(2, length, seed=length) for length in LENGTHS), strict=True)
    return list(inputs), list(targets)


def reordered(rank: int, world: int, name: str, policy: str) -> list:
    """(losses, gradients) of three steps in which cheap micro-batches enter first and last."""
    pipe = Pipeline(
        dawdlers(5, 1.0),
        loss=token_loss,
        schedule=name,
        microbatches=len(LENGTHS),
        mesh=init_mesh(pp=world),
        policy=policy,
        cost_of=lambda inputs: inputs.shape[1],
    )
    found = []
    for _ in range(3):
        result = pipe.step(*unequal())
        found.append((result.losses, {key: parameter.grad.clone() for key, parameter in pipe.named_parameters()}))
        for _, parameter in pipe.named_parameters():
            parameter.grad = None
    pipe.close()
    return found


@pytest.mark.parametrize(("name", "policy"), [("1f1b", "follow"), ("zb-h1", "swift")])
def test_a_permutation_gives_the_gradients_of_the_permuted_list_and_losses_by_number(procs, name, policy):
    order = source_order(LENGTHS)
    inputs, targets = unequal()
    model = nn.Sequential(*(build() for build in dawdlers(5, 0.0)))
    losses = {}
    for i in order:
        loss = token_loss(model(inputs[i]), targets[i])
        (loss / len(order)).backward()
        losses[i] = loss.item()
    for step in zip(*procs.run(reordered, name, policy, world=2), strict=True):
        found: dict[str, Tensor] = {}
        for theirs, mine in step:
            assert list(theirs) == [losses[i] for i in range(len(order))]
            found |= mine
        assert same(found, {key: parameter.grad for key, parameter in model.named_parameters()})
