"""The pipeline: a model cut into stages over ranks, and a schedule that trains it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipeswift
from pipeswift import codec, schedules
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.policy import Follow
from pipeswift.runtime.batch import Split, split
from pipeswift.runtime.boundary import flatten
from pipeswift.runtime.executor import Executor, Job
from pipeswift.runtime.layers import Layer, check_layout, even_layout, layers_of, materialise
from pipeswift.runtime.loss import LossFunction, StepLoss, total
from pipeswift.runtime.optimizer import Optimizer
from pipeswift.runtime.peers import Peers, agree, peers_of
from pipeswift.runtime.recorder import Recorder, gather
from pipeswift.runtime.seeds import mix
from pipeswift.runtime.stage import Segment, Stage
from pipeswift.runtime.weights import Weights
from pipeswift.runtime.wiring import Wiring
from pipeswift.schedules.forward_only import forward_only
from pipeswift.trace import Trace
from pipeswift.verify import check


@dataclass(frozen=True)
class Result:
    """What a step or an evaluation gave, the same on every rank except for `outputs` and `trace`.

    loss: the mean over all samples, or sum over count. losses: what the loss function gave, by micro-batch.
    outputs: by micro-batch, on the ranks that hold the last stage, when asked for. trace: this rank's spans.
    """

    loss: float
    losses: tuple[float, ...]
    outputs: tuple[Any, ...] | None
    trace: Trace


class Pipeline:
    """Trains `layers` as a pipeline.

    layers: an nn.Sequential, a list of modules, or of functions that build them; with functions a rank materialises
        only its own stages, and any cut gives the same initial weights (each layer is built under (seed, its index)).
    loss: (output, target) -> a scalar mean, or (sum, count), which is divided by the count over all micro-batches.
    schedule: a name (see `pipeswift schedules`), a Schedule, or the path of a schedule file.
    microbatches, chunks: for a named schedule.
    mesh: from `init_mesh`; None runs all stages in this process.
    layout: layers per stage; by default as even as can be.
    config: settings that must be equal on all ranks, beyond schedule, layout and versions.

    Raises PipeSwiftError, on every rank, when the schedule is invalid, the layers do not fit it, or ranks disagree.
    """

    def __init__(
        self,
        layers: nn.Module | Sequence[Layer],
        *,
        loss: LossFunction,
        schedule: str | Path | Schedule = "1f1b",
        microbatches: int | None = None,
        chunks: int | None = None,
        mesh: DeviceMesh | Peers | None = None,
        layout: Sequence[int] | None = None,
        seed: int = 0,
        dynamic_shapes: bool = False,
        config: Mapping[str, object] | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ):
        self._peers = peers_of(mesh, timeout)
        self._loss, self._seed, self._dynamic = loss, seed, dynamic_shapes
        try:
            self.schedule = _resolve(schedule, self._peers.size, microbatches, chunks)
            every_layer = layers_of(layers)
            self.layout = _layout(layout, len(every_layer), self.schedule.num_stages)
            check(self.schedule)
            mine = [stage for _, stage in self.schedule.stages_on(self.rank)]
            self.stages = {stage: self._build(every_layer, stage) for stage in mine}
            facts = self._facts(config or {})
        except PipeSwiftError as error:
            facts = {"error": str(error)}
        agree(self._peers, facts)
        self._weights = {index: Weights(stage.named_parameters()) for index, stage in self.stages.items()}
        self._wiring = Wiring(self._peers, self.schedule.routes)
        self._executor = self._executor_of(self.schedule)
        self._evaluators: dict[int, Executor] = {}
        self._ready_hooks: list[Callable[[Stage], None]] = []
        self._sums = False  # whether the loss function gives (sum, count); known after the first step
        self.steps = 0  # steps begun; with the seed, it keys the random numbers

    @property
    def rank(self) -> int:
        return self._peers.rank

    @property
    def num_ranks(self) -> int:
        return self._peers.size

    # Training and evaluation.

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        scale: float = 1.0,
        outputs: bool = False,
    ) -> Result:
        """Forward and backward of one mini-batch; gradients add to what is there, until the optimizer steps.

        inputs, targets: nested containers of tensors with the batch in dimension 0, cut into micro-batches there. Only
        ranks that hold the first stage read `inputs`, only those that hold the last read `targets`.
        scale: factor on the loss, such as 1/K when K steps make one optimizer step.
        outputs: keep the last stage's outputs.
        """
        earlier = {index: w.set_aside() for index, w in self._weights.items()} if self._sums else {}
        job = self._job(inputs, targets, self.schedule, scale)
        job.keep_outputs = outputs
        self.steps += 1
        self._set_mode(training=True)
        recorder = self._executor.run(job)
        result, count = self._close(job, self.schedule, recorder)
        if count is not None:
            self._sums = True
            for weights in self._weights.values():
                weights.scale(count / scale)
        for index, taken in earlier.items():
            self._weights[index].restore(taken)
        for weights in self._weights.values():
            weights.publish()
        return result

    def evaluate(
        self, inputs: Any = None, targets: Any = None, *, microbatches: int | None = None, outputs: bool = False
    ) -> Result:
        """Forward only, in evaluation mode; no gradients, and nothing of training is touched."""
        count = microbatches or self.schedule.num_microbatches
        if count not in self._evaluators:
            self._evaluators[count] = self._executor_of(forward_only(self.schedule, count))
        executor = self._evaluators[count]
        job = self._job(inputs, targets, executor.schedule, 1.0)
        job.keep_outputs = outputs
        self._set_mode(training=False)
        with torch.no_grad():
            recorder = executor.run(job)
        return self._close(job, executor.schedule, recorder)[0]

    def gather_trace(self, result: Result) -> Trace:
        """The trace of all ranks, on every rank. Every rank must call this."""
        return gather(self._peers, result.trace)

    # Parameters.

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters in model order; names are those of the whole model."""
        for weights in self._weights.values():
            yield from weights.leaves.items()

    def optimizer(self, kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Optimizer:
        """An optimizer of this rank's parameters that clips by the norm over the whole model."""
        return Optimizer(self._peers, list(self._weights.values()), list(self.stages), kind, settings)

    def on_grad_ready(self, hook: Callable[[Stage], None]) -> None:
        """Calls `hook(stage)` in every step when the last backward of that stage has ended."""
        self._ready_hooks.append(hook)

    def close(self) -> None:
        """Ends the pipeline's threads. Call between steps; a closed pipeline cannot step."""
        self._wiring.close()

    # Inside.

    def _facts(self, config: Mapping[str, object]) -> dict[str, str]:
        return {
            "versions": f"pipeswift {pipeswift.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}",
            "schedule": f"{self.schedule.name}, {self.schedule.num_microbatches} micro-batches "
            f"({self.schedule.fingerprint[:12]})",
            "layout": str(list(self.layout)),
            "seed": str(self._seed),
            **{f"setting {name}": repr(value) for name, value in config.items()},
        }

    def _build(self, layers: Sequence[Layer], stage: int) -> Stage:
        first = sum(self.layout[:stage])
        mine = [materialise(layers[i], i, self._seed) for i in range(first, first + self.layout[stage])]
        return Stage(stage, [Segment(mine, first, self._peers.device)])

    def _executor_of(self, schedule: Schedule) -> Executor:
        return Executor(
            schedule,
            self.rank,
            self.stages,
            self._wiring,
            Follow(schedule),
            on_backward=lambda stage: self._weights[stage.index].fold(),
            grad_ready=self._grad_ready,
        )

    def _grad_ready(self, stage: Stage) -> None:
        for hook in self._ready_hooks:
            hook(stage)

    def _set_mode(self, training: bool) -> None:
        for stage in self.stages.values():
            for module in stage.modules():
                if module.training != training:
                    module.train(training)

    def _job(self, inputs: Any, targets: Any, schedule: Schedule, scale: float) -> Job:
        job = Job(key=mix(self._seed, self.steps))
        if 0 in self.stages:
            cut: Split = split(inputs, schedule.num_microbatches, "inputs")
            job.inputs = [flatten(part) for part in cut.parts]
            job.uniform = not self._dynamic and all(flat.spec == job.inputs[0].spec for flat in job.inputs)
        if schedule.num_stages - 1 in self.stages:
            cut = split(targets, schedule.num_microbatches, "targets")
            job.loss = StepLoss(self._loss, cut.parts, cut.shares, scale)
        return job

    def _close(self, job: Job, schedule: Schedule, recorder: Recorder) -> tuple[Result, float | None]:
        """Makes the losses known to all ranks; also says the global count when the loss gives (sum, count)."""
        blank = torch.zeros(schedule.num_microbatches, 3, dtype=torch.float64)
        table = self._peers.all_sum(blank if job.loss is None else job.loss.table())
        loss, count = total(table)
        outputs = tuple(job.outputs[i] for i in sorted(job.outputs)) if job.keep_outputs and job.outputs else None
        trace = recorder.trace(name=schedule.name)
        return Result(loss, tuple(table[:, 0].tolist()), outputs, trace), count


def _resolve(schedule: str | Path | Schedule, ranks: int, microbatches: int | None, chunks: int | None) -> Schedule:
    if isinstance(schedule, str) and not schedule.endswith((".csv", ".json")):
        if microbatches is None:
            raise PipeSwiftError(
                f"schedule {schedule!r} needs a number of micro-batches, for example microbatches={ranks}"
            )
        return schedules.build(schedule, ranks, microbatches, chunks)
    found = schedule if isinstance(schedule, Schedule) else codec.load(schedule)
    for setting, given, has in (
        ("pp", ranks, found.num_ranks),
        ("microbatches", microbatches, found.num_microbatches),
        ("chunks", chunks, found.chunks),
    ):
        if given is not None and given != has:
            raise PipeSwiftError(f"schedule {found.name} has {setting} = {has}, but {setting} = {given} was asked for")
    return found


def _layout(layout: Iterable[int] | None, layers: int, stages: int) -> tuple[int, ...]:
    return even_layout(layers, stages) if layout is None else check_layout(tuple(layout), layers, stages)
