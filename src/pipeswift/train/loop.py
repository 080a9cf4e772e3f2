"""The training loop, read top to bottom; every rank runs it."""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from pipeswift.runtime import Pipeline, Result, init_mesh
from pipeswift.runtime.peers import peers_of
from pipeswift.trace import Trace, busy_per_rank, makespan
from pipeswift.train import data
from pipeswift.train.config import Config
from pipeswift.train.cut import Cut, agree_on_cut
from pipeswift.train.metrics import Outcome, Row, Step
from pipeswift.train.model import builders, next_byte_loss
from pipeswift.train.updates import Updates, updates_of

_LATE_STEPS = 20
_EVALUATION = 1 << 32  # keeps the draws of held-out text apart from those of training


def train(config: Config, on_cut: Callable[[Cut], None], on_row: Callable[[Row], None]) -> Outcome:
    """Train as `config` says. Every rank of the mesh must call this.

    on_cut: called once it is known which layers each stage gets. on_row: called after every step.
    """
    torch.set_num_threads(config.pipeline.threads)
    text = data.load(config.data.path, window=config.model.context + 1)
    pipe, cut = build(config, text)
    on_cut(cut)
    updates = updates_of(pipe, config)
    began = perf_counter()
    first_held_out = held_out = evaluate(pipe, config, text)
    on_row(Row(step=0, held_out=held_out))
    late: deque[tuple[Trace, ...]] = deque(maxlen=_LATE_STEPS)
    durations: list[float] = []
    for index in range(config.train.steps):
        step, traces = train_step(pipe, updates, config, text, index)
        late.append(traces)
        durations.append(step.seconds)
        done = index + 1
        evaluates = done % config.train.eval_every == 0 or done == config.train.steps
        if evaluates:
            held_out = evaluate(pipe, config, text)
        on_row(Row(step=done, held_out=held_out if evaluates else None, training=step))
    seconds = perf_counter() - began
    pipe.close()
    return Outcome(
        schedule=pipe.schedule,
        cut=cut,
        late_steps=tuple(late),
        first_held_out=first_held_out,
        held_out=held_out,
        tokens_per_second=config.train.batch * config.model.context / statistics.median(durations),
        seconds=seconds,
        grains=pipe.grains,
        cores=cores(),
        ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", pipe.num_ranks * pipe.num_replicas)),
        threads=config.pipeline.threads,
    )


def train_step(
    pipe: Pipeline, updates: Updates, config: Config, text: data.Text, index: int
) -> tuple[Step, tuple[Trace, ...]]:
    """One step. Returns its figures and the timelines of its last flush, one of each replica."""
    settings, flushes = config.train, config.train.accumulate
    began = perf_counter()
    batches = [draw(text.training, config, index * flushes + flush, pipe.replica) for flush in range(flushes)]
    taken = updates.step(index, batches)
    seconds = perf_counter() - began

    traces = pipe.gather_traces(taken.results[-1])
    step = Step(
        loss=mean_loss(taken.results),
        learning_rate=taken.rate,
        gradient_norm=taken.norm,
        seconds=seconds,
        tokens_per_second=settings.batch * config.model.context / seconds,
        utilization=tuple((busy_per_rank(traces[0]) / makespan(traces[0])).tolist()),
        **expert_figures(pipe, taken.results[-1] if config.model.experts else None),
    )
    return step, traces


def expert_figures(pipe: Pipeline, result: Result | None) -> dict[str, Any]:
    """What `Step` says of experts, over all ranks, for a step with this result; None: of a dense model."""
    if result is None:
        return {}
    layers = pipe.gather_figures(result).values()
    sent, saved = (sum(int(layer.sums.get(name, 0)) for layer in layers) for name in ("sent", "saved"))
    rows = [layer.sums["rows"] for layer in layers]
    return {
        "expert_load": tuple((counts.max() / counts.double().mean()).item() for counts in rows),
        "expert_rows": tuple(tuple(counts.tolist()) for counts in rows),
        "dropped": sum(int(layer.sums["dropped"]) for layer in layers),
        "saved": saved / (sent + saved) if saved else None,
        "balance": statistics.fmean(layer.means["balance"].item() for layer in layers),
    }


def build(config: Config, text: data.Text) -> tuple[Pipeline, Cut]:
    """The pipeline that `config` describes; all ranks must hold the same settings and the same text."""
    settings, schedule = config.pipeline, config.build_schedule()
    peers = peers_of(init_mesh(pp=settings.pp, dp=settings.dp, ep=settings.ep))
    cut = agree_on_cut(config, schedule, peers)
    pipe = Pipeline(
        builders(**config.model.shape),
        loss=next_byte_loss,
        schedule=schedule,
        mesh=peers,
        layout=cut.layout,
        seed=config.train.seed,
        weights=settings.weights,
        updates_every=settings.updates_every,
        policy=settings.policy,
        in_flight=settings.in_flight,
        batched_weight_gradients=settings.batched_weight_gradients,
        expert_chunks=settings.expert_chunks,
        config=config.agreement() | {"data": text.fingerprint},
    )
    return pipe, cut


def evaluate(pipe: Pipeline, config: Config, text: data.Text) -> float:
    """Mean loss on the same held-out batches every time, nats per byte."""
    batches = range(_EVALUATION, _EVALUATION + config.train.eval_batches)
    return mean_loss([pipe.evaluate(*draw(text.held_out, config, batch, pipe.replica)) for batch in batches])


def mean_loss(results: Sequence[Result]) -> float:
    """The mean over flushes of one size."""
    return statistics.fmean(result.loss for result in results if result.loss is not None)


def draw(text: np.ndarray, config: Config, number: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one flush on one replica: its share of batch `number` of those that the seed gives."""
    size = config.train.batch // config.train.accumulate
    arrays = data.batch(text, size=size, context=config.model.context, seed=config.train.seed, number=number)
    inputs, targets = (torch.from_numpy(array).chunk(config.pipeline.dp)[replica] for array in arrays)
    return inputs, targets


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
