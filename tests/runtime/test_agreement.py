"""Swift over expert groups, on real processes: members agree, and gradients are the static run's, bit for bit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipeswift.ir import Schedule
from pipeswift.moe import Skew
from pipeswift.passes import overlap
from pipeswift.policy import Follow, Rules, Summary, Swift, source_order
from pipeswift.policy.diary import tally
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.news import News
from pipeswift.runtime.parley import AGREEMENTS
from pipeswift.schedules import build
from pipeswift.trace import COMPUTE, Trace, whole_passes
from tests.moe.models import expert_block
from tests.procs import CaseFailed, Pool
from tests.runtime.models import Embed, Head, batch, same, token_loss


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
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    losses, gradients = [], {}
    for step in range(steps):
        result = pipe.step(*batch(2 * case.microbatches, seed=10 * step + rank % case.dp))
        losses.append(result.losses)
        gradients = {name: weight.grad.clone() for name, weight in pipe.named_parameters() if weight.grad is not None}
        optimizer.step()
    trace = pipe.gather_trace(result)
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
    Case("zb-h1", in_flight=4, chunks=2, settings={"experts": 4, "top_k": 1, "favourite": 2}),
    Case("interleaved-1f1b", stages=4, in_flight=3),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (Case("zb-h1", in_flight=1), Case("zb-v", stages=4), Case("zb-h1", dp=4, in_flight=4))
    ),
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


def test_members_leave_the_hint_together(procs: Pool):
    case = Case("zb-h1", microbatches=8, in_flight=6)
    found: list[Trained] = procs.run(train, case, partial(swift, 6), 2, 4.0, world=4)
    hint = [list(order.actions()) for order in build("zb-h1", 2, 8).orders]
    for rank in range(2):
        leader, follower = found[2 * rank : 2 * rank + 2]
        assert leader.order == follower.order
        rules = tally(leader.trace.counters, 2)
        assert (leader.order != hint[rank]) == (rules.get("advance", [0, 0])[rank] > 0)
    assert "advance" in tally(found[0].trace.counters, 2)


def test_a_policy_without_foresight_leads_as_well(procs: Pool):
    case = Case("1f1b")
    static, led = (procs.run(train, case, policy, 2, 0.0, world=4) for policy in ("follow", Follow))
    for one, other in zip(static, led, strict=True):
        assert one.losses == other.losses
        assert same(one.gradients, other.gradients)
        assert one.order == other.order


def messages(trace: Trace) -> dict[int, int]:
    """By rank, how often it told others something in this step."""
    return {counter.rank: int(counter.value[-1]) for counter in trace.counters if counter.name == AGREEMENTS}


def test_the_trace_tells_how_many_messages_that_took(procs: Pool):
    leading, following = (procs.run(train, Case("zb-h1"), Swift, 1, world=4)[rank].trace for rank in (0, 1))
    passes = 4 * 3
    for told in messages(leading).values():
        assert 1 <= told <= 2 * passes, "each pass is told of once, with the next one or before it"
    assert messages(following) == {0: 4, 1: 4}, "whatever comes is told of at once"


def calibrated(rank: int, world: int) -> list[tuple[bool, bool]]:
    """In which steps Swift decided, and members told each other something."""
    settings = {"experts": 4, "top_k": 1}
    pipe = Pipeline(
        [Embed, *(partial(dawdling_block, i, 1.0, rank, settings) for i in range(2)), Head],
        loss=token_loss,
        schedule="zb-h1",
        microbatches=4,
        mesh=init_mesh(pp=2, ep=2),
        policy="swift",
    )
    found = []
    for _ in range(4):
        counters = pipe.step(*batch(8)).trace.counters
        found.append((bool(tally(counters, 2)), AGREEMENTS in {counter.name for counter in counters}))
    pipe.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("hotline")]
    assert not left
    return found


def test_by_name_it_follows_until_it_is_calibrated(procs: Pool):
    leader, follower = ([(False, False)] * 2 + [(decides, True)] * 2 for decides in (True, False))
    assert procs.run(calibrated, world=4) == [leader, follower] * 2


class Frozen(Dawdler):
    """Stands still for two seconds in one of its forwards, on one rank."""

    def __init__(self, freezes: bool):
        super().__init__(0.0, 0)
        self._left = 3 if freezes else 0

    def forward(self, x: Tensor) -> Tensor:
        self._left -= 1
        time.sleep(2.0 if self._left == 0 else 0.002)
        return x


def frozen(rank: int, world: int, victim: int) -> list[int]:
    """How often each rank of the pipeline forced what was ready."""
    block = nn.Sequential(Frozen(rank == victim), *expert_block(1, {"experts": 4}))
    pipe = Pipeline(
        [Embed, partial(expert_block, 0, {"experts": 4}), block, Head],
        loss=token_loss,
        schedule="zb-h1",
        microbatches=8,
        mesh=init_mesh(pp=2, ep=2),
        policy=lambda hint: Swift(hint, {(0, 0): 8, (1, 0): 8}, rules=Rules(follow=False, advance=False)),
        in_flight=8,
        expert_chunks=1,
    )
    trace = pipe.gather_trace(pipe.step(*batch(16)))
    pipe.close()
    return tally(trace.counters, 2).get("force", [0, 0])


@pytest.mark.parametrize("victim", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_frozen_member_makes_other_groups_force_what_is_ready(procs: Pool, victim: int):
    assert procs.run(frozen, victim, world=4)[0][0] > 0


class Watched(Embed):
    """Remembers how long the sequences were that came in."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, input: Tensor) -> Tensor:
        self.lengths.append(input.shape[1])
        return super().forward(input)


LENGTHS = ((3, 7, 2, 5), (4, 1, 9, 5))  # by member


def reordered(rank: int, world: int, policy: Any) -> tuple[list[int], tuple[float, ...]]:
    """How long the sequences were, in the order in which they entered here, and the losses."""
    pipe = Pipeline(
        [Watched, *(partial(expert_block, i, {"experts": 4}) for i in range(2)), Head],
        loss=token_loss,
        schedule="zb-h1",
        microbatches=4,
        mesh=init_mesh(pp=2, ep=2),
        policy=policy,
        cost_of=lambda inputs: inputs.shape[1],
        expert_chunks=1,
    )
    inputs, targets = zip(*(batch(2, length, seed=length) for length in LENGTHS[rank % 2]), strict=True)
    losses = pipe.step(list(inputs), list(targets)).losses
    lengths = [x for stage in pipe.stages.values() for layer in stage.layers() for x in getattr(layer, "lengths", ())]
    pipe.close()
    return lengths, losses


def test_members_enter_micro_batches_in_one_order_by_the_sum_of_their_costs(procs: Pool):
    order = source_order([sum(lengths) for lengths in zip(*LENGTHS, strict=True)])
    entered, losses = zip(*procs.run(reordered, Swift, world=4), strict=True)
    assert list(entered) == [*([lengths[i] for i in order] for lengths in LENGTHS), [], []]
    assert losses == tuple(static for _, static in procs.run(reordered, "follow", world=4))


def woven(rank: int, world: int) -> None:
    Pipeline(
        [Embed, *(partial(expert_block, i, {"experts": 4}) for i in range(2)), Head],
        loss=token_loss,
        schedule=overlap(build("1f1b", 2, 4)),
        mesh=init_mesh(pp=2, ep=2),
        policy=Follow,
    )


def test_woven_pairs_are_refused(procs: Pool):
    with pytest.raises(CaseFailed, match=r"cannot start the woven pairs of 1f1b.* \(ep = 2\).*: use policy follow"):
        procs.run(woven, world=4)


@contextmanager
def unreliable_news(seed: int) -> Iterator[None]:
    """Of what neighbours tell, a third is lost and a third comes later than what they have told since."""
    draw, hear, late = random.Random(seed), News.heard, []

    def heard(news: News) -> Iterator[Summary]:
        fresh, held = list(hear(news)), list(late)
        late.clear()
        for summary in fresh:
            fate = draw.randrange(3)
            if fate == 0:
                yield summary
            elif fate == 1:
                late.append(summary)
        yield from held

    News.heard = heard
    try:
        yield
    finally:
        News.heard = hear


def train_in_the_dark(rank: int, world: int, *args: Any) -> Trained:
    with unreliable_news(rank):
        return train(rank, world, *args)


SKEWED = {"experts": 4, "top_k": 1, "skew": Skew("drifting", 3.0)}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Case("zb-h1", microbatches=6, in_flight=4, settings=SKEWED), 300),
        (Case("interleaved-1f1b", stages=4, microbatches=4, in_flight=4, settings=SKEWED), 100),
        (Case("zb-h1", pp=4, stages=4, microbatches=6, settings=SKEWED), 300),
    ],
    ids=str,
)
def test_hundreds_of_steps_under_sleeps_drift_and_stale_news_are_the_static_ones(procs: Pool, case: Case, steps: int):
    static = procs.run(train, case, "follow", steps, 0.0, world=case.world, timeout=600.0)
    found = procs.run(
        train_in_the_dark, case, partial(swift, case.in_flight), steps, 0.5, world=case.world, timeout=600.0
    )
    for one, other in zip(static, found, strict=True):
        assert one.losses == other.losses
        assert same(one.gradients, other.gradients)
