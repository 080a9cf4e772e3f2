"""The pipeline: a model cut into stages over ranks, and a schedule that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.policy import Policy
from pipeswift.program import Grain
from pipeswift.runtime.accumulation import Accumulation
from pipeswift.runtime.assembly import Assembly, Request, assemble
from pipeswift.runtime.async_optimizer import AsyncOptimizer, Update
from pipeswift.runtime.auxiliary import Figures, gather_figures
from pipeswift.runtime.batch import Rules
from pipeswift.runtime.calls import Job
from pipeswift.runtime.channel import Inbox
from pipeswift.runtime.copies import Copies
from pipeswift.runtime.executor import Executor
from pipeswift.runtime.executors import Executors
from pipeswift.runtime.granularity import Granularity
from pipeswift.runtime.jobs import Jobs
from pipeswift.runtime.lanes import Lanes
from pipeswift.runtime.layers import Layer
from pipeswift.runtime.loss import LossFunction, total
from pipeswift.runtime.modes import Modes
from pipeswift.runtime.optimizer import Optimizer
from pipeswift.runtime.outcome import Losses, Where, collect_outputs
from pipeswift.runtime.peers import Peers, peers_of
from pipeswift.runtime.progress import Progress
from pipeswift.runtime.recorder import gather, gather_replicas
from pipeswift.runtime.reduction import Reducer, buckets_of, done_order
from pipeswift.runtime.result import Result
from pipeswift.runtime.stage import Stage
from pipeswift.runtime.states import START_UP
from pipeswift.runtime.steering import Steering
from pipeswift.runtime.ties import Ties
from pipeswift.runtime.watchdog import watch
from pipeswift.runtime.wiring import Wiring
from pipeswift.trace import Trace
from pipeswift.versions import WeightPolicy


class Pipeline:
    """Trains `layers` as a pipeline.

    layers: an nn.Sequential, a list of modules, or of functions that build them; with functions, or modules on the meta
        device, a rank materialises only its own stages, and any cut gives the same initial weights (each layer is built
        under (seed, its index)). Layers may take keyword arguments: see `step`.
    loss: (output, target) -> a scalar mean, or (sum, count), which is divided by the count over all micro-batches.
    schedule: a name (see `pipeswift schedules`), a Schedule, or the path of a schedule file.
    microbatches, chunks: for a named schedule.
    mesh: from `init_mesh`; None runs all stages in this process. With dp > 1 each replica of the pipeline is given its
        own part of the batch, and all get the gradients of the whole; see `step`.
    layout: layers per stage; by default as even as can be.
    tie: groups of parameters that are one, by name ("0.weight" is `weight` of layer 0); parameters that modules of the
        list share are found.
    split: for keyword arguments, the dimension to cut along, or None to give it whole to every micro-batch.
    seed: of all random numbers, those of initial weights and of dropout alike.
    dynamic_shapes: set it when the shapes at a boundary depend on the data and not only on the inputs' shapes.
    batched_weight_gradients: where W of one stage follow each other in the schedule, the last of them does the work of
        all, each weight's in one product. The gradients are then equal within rounding, not bit for bit.
    weights, updates_every: for a schedule without flush, whose stages update on their own while micro-batches are in
        flight: which version of its weights each micro-batch uses ("stash", "vertical", "2bw", "none", see
        `pipeswift.versions`), and how many micro-batches make an update, by default 1. Each stage clips on its own.
    policy, in_flight: who decides what a rank starts next, "follow" (the schedule's order), "swift", which leaves it
        where stage times swing, or "replan", which finds another between steps when stage times have changed; and how
        many micro-batches a stage may then hold. See `runtime.steering`.
    expert_chunks: how many groups a rank's experts are cut into, so that all-to-alls of one hide behind the compute of
        another; for forward and backward, or one number for both. "auto": one in the first step, at whose end ranks
        measure all-to-alls and experts for a moment, and then what that suggests (`grains`). For layers whose experts
        ranks of the mesh share.
    cost_of: what a micro-batch will cost, in any unit, from its inputs (say a sequence length squared). Cheap ones
        then enter the pipeline first and last, where experts are shared out by the sum of costs over their ranks.
        Losses and outputs keep the caller's order; gradients are those of micro-batches in the order they entered in.
    config: settings that must be equal on all ranks, beyond schedule, layout, ties, seed and versions.
    bucket: how many gradients replicas reduce at a time; a parameter that has more is reduced by itself.
    watchdog: seconds without any progress in a step, or without a sign of life of a rank, after which all ranks are
        ended with a table of what each was doing; more than the longest operation takes. None: no watchdog.
    timeout: seconds that ranks wait for each other to make the pipeline, and the transport for any one message.

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
        tie: Ties = (),
        split: Rules | None = None,
        seed: int = 0,
        dynamic_shapes: bool = False,
        batched_weight_gradients: bool = False,
        weights: WeightPolicy | None = None,
        updates_every: int | None = None,
        policy: str | Callable[[Schedule], Policy] = "follow",
        in_flight: int | None = None,
        expert_chunks: int | tuple[int, int] | Literal["auto"] = "auto",
        cost_of: Callable[[Any], float] | None = None,
        config: Mapping[str, object] | None = None,
        bucket: int = 1 << 22,
        watchdog: float | None = 60.0,
        timeout: float = 1800.0,
    ):
        self._peers = peers_of(mesh, timeout)
        self._progress = Progress(self._peers.place, self._peers.sharers)
        self._watchdog = watch(self._peers, self._progress, watchdog)
        self._batched = batched_weight_gradients
        inbox = Inbox()
        self._steering = Steering(self._peers, policy, in_flight, inbox)
        settings = {
            **(config or {}),
            "batched_weight_gradients": batched_weight_gradients,
            "policy": self._steering.name,
            "in_flight": in_flight,
            "cost_of is given": cost_of is not None,
        }
        self._request = Request(
            schedule,
            microbatches,
            chunks,
            layout,
            tie,
            {} if split is None else split,
            seed,
            settings,
            weights,
            updates_every,
            expert_chunks,
            bucket,
            self._steering.check,
        )
        self._assembly = self._assemble(layers)
        self._jobs = Jobs(self._peers, self._progress, self._assembly, loss, split or {}, seed, dynamic_shapes, cost_of)
        self._weights = list(self._assembly.weights.values())
        self._asynchronous = self._assembly.asynchronous
        order = done_order(self.schedule, self.rank)
        self._reducer = Reducer(buckets_of(order, self.stages, self._weights, self._peers.replicas, bucket))
        self._accumulation = Accumulation(self._peers, self._assembly, self._reducer, self._progress)
        self._granularity = Granularity(self._peers, self.stages, self.schedule, self._request.grain)
        self._wiring = Wiring(self._peers, self.schedule.routes, inbox)
        self._lanes = lanes = Lanes()
        self._progress.exchange = lambda: lanes.waits_for
        self._executors = Executors(self._request, self._assembly, self.num_ranks, self._make_executor)
        self._last_stage_ranks = sorted({route[-1] for route in self.schedule.routes})
        self._modes = Modes()
        self._ready_hooks: list[Callable[[Stage], None]] = []
        self.steps = 0  # steps begun; with the seed, it keys the random numbers

    @property
    def rank(self) -> int:
        return self._peers.rank

    @property
    def num_ranks(self) -> int:
        return self._peers.size

    @property
    def replica(self) -> int:
        """Which of the `num_replicas` copies of the pipeline this rank is part of."""
        return self._peers.replicas.rank

    @property
    def num_replicas(self) -> int:
        return self._peers.replicas.size

    @property
    def schedule(self) -> Schedule:
        return self._assembly.schedule

    @property
    def layout(self) -> tuple[int, ...]:
        """Layers per stage."""
        return self._assembly.layout

    @property
    def grains(self) -> Mapping[int, Grain]:
        """By stage, of all ranks of this pipeline: in how many chunks its experts are, where ranks share these out."""
        return self._granularity.grains

    @property
    def stages(self) -> Mapping[int, Stage]:
        """The stages that this rank holds, by index."""
        return self._assembly.stages

    # Training and evaluation.

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        microbatches: int | None = None,
        scale: float = 1.0,
        outputs: Where | None = None,
        losses: Where = "all",
        **arguments: Any,
    ) -> Result:
        """Forward and backward of one mini-batch; gradients add to what is there, until the optimizer steps.

        Without flush, the updates happen inside: give many micro-batches, since the pipeline fills when a step begins
        and drains when it ends. By then all stages have made the same updates, and the next step starts from there.

        inputs, targets: tensors, or tuples or dicts of them, with the batch in dimension 0, where they are cut into
            micro-batches; or lists of ready-made micro-batches, which are never cut. Only ranks that hold the first
            stage read `inputs`, only those that hold the last read `targets`. Every replica gives a part of its own, of
            any size; the batch is all of them, in the order of replicas, and so are its micro-batches.
        microbatches: for this step, if not the pipeline's own; needs a schedule given by name.
        scale: factor on the loss, such as 1/K when K steps make one optimizer step.
        outputs: keep the model's outputs, on ranks that hold the last stage (of the micro-batches that end there, where
            there are several) or on all.
        losses: "last" leaves the loss on the ranks that hold the last stage, and saves a synchronisation.
        arguments: keyword arguments for every layer whose forward names them, on every rank; see `split`.
        """
        if not torch.is_grad_enabled():
            raise PipeSwiftError(
                "step() makes gradients: call it outside no_grad() and inference_mode(), or evaluate()"
            )
        if not scale or not isfinite(scale):
            raise PipeSwiftError(
                f"scale = {scale} is no finite number other than 0: use 1.0, or 1/K for K steps in one"
            )
        with self._progress.during(f"step {self.steps + 1}"):
            executor = self._executors.of(True, microbatches)
            job = self._jobs.make(inputs, targets, arguments, executor.schedule, self.steps, scale, outputs)
            self.steps += 1
            if self._asynchronous:
                with self._asynchronous.running(executor.schedule, self.rank):
                    return self._run(executor, job, outputs, losses)[0]
            self._accumulation.begin()
            result, count = self._run(executor, job, outputs, losses)
            self._accumulation.finish(result._recorder, count, scale)
            if self._steering.learns_from(executor.schedule):
                with self._progress.joining("their times"):
                    self._steering.learn(executor.schedule, result.trace, result.figures)
            if self._granularity.due:
                with self._progress.joining("what experts cost"):
                    self._granularity.measure(self._lanes, self._progress.move)
                self._executors.drop()
            return result

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        microbatches: int | None = None,
        outputs: Where | None = None,
        losses: Where = "all",
        **arguments: Any,
    ) -> Result:
        """Forward only, in evaluation mode; no gradients, and nothing of training is touched.

        Every replica must evaluate; the loss is that of all their parts. The parameters are those of `step`, but:

        targets: None leaves the loss out.
        microbatches: any number, whatever the schedule.
        """
        with self._progress.during("evaluation"), torch.no_grad():
            executor = self._executors.of(False, microbatches)
            job = self._jobs.make(inputs, targets, arguments, executor.schedule, self.steps, 1.0, outputs)
            return self._run(executor, job, outputs, losses)[0]

    def gather_trace(self, result: Result) -> Trace:
        """The trace of all ranks of this pipeline, on each of them. Every rank must call this."""
        with self._progress.during("gathering the trace"), self._progress.joining("their traces"):
            return gather(self._peers, result.trace)

    def gather_traces(self, result: Result) -> tuple[Trace, ...]:
        """The trace of every replica, on one clock, on each rank of all. Every rank of all must call this."""
        with self._progress.during("gathering the traces"), self._progress.joining("their traces"):
            return gather_replicas(self._peers, result.trace)

    def gather_figures(self, result: Result) -> dict[str, Figures]:
        """What layers of all ranks and replicas have reported, by layer, on every rank. Every rank must call this."""
        with self._progress.during("gathering figures"), self._progress.joining("their figures"):
            return gather_figures(self._peers, result.figures)

    # Parameters.

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters in model order; names are those of the whole model."""
        for weights in self._weights:
            yield from weights.leaves.items()

    def optimizer(self, kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Optimizer:
        """An optimizer of this rank's parameters that clips by the norm over the whole model."""
        if self._asynchronous:
            raise PipeSwiftError(
                f"schedule {self.schedule.name} updates its weights within step(): make its optimizer with "
                "pipe.async_optimizer(...), and leave optimizer.step() out"
            )
        return Optimizer(self._peers, self._assembly.weights, self._assembly.ties, kind, settings, self._progress)

    def async_optimizer(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        *,
        clip_norm: float | None = None,
        rate: Callable[[Update], float] | None = None,
        **settings: Any,
    ) -> AsyncOptimizer:
        """For a schedule without flush: optimizers that `step` steps, one per stage, each when its update is due.

        clip_norm: a stage's gradients are scaled so that their norm, over this stage alone, is at most that.
        rate: the learning rate of an update; without it, that of `settings`.
        """
        if not self._asynchronous:
            raise PipeSwiftError(
                f"schedule {self.schedule.name} flushes before it updates: make its optimizer with pipe.optimizer(...)"
            )
        held = self._assembly.weights
        copies = Copies(self._peers, self._assembly.ties, held, self._progress)
        made = AsyncOptimizer(copies, self._peers, held, kind, settings, clip_norm, rate, self._progress)
        self._asynchronous.optimizer = made
        return made

    def on_grad_ready(self, hook: Callable[[Stage], None]) -> None:
        """Calls `hook(stage)` in every step when the last backward of that stage has ended."""
        self._ready_hooks.append(hook)

    def close(self) -> None:
        """Ends the pipeline's threads. Call between steps; a closed pipeline cannot step."""
        parts = (self._wiring, self._reducer, self._steering, self._lanes, self._watchdog, self._executors)
        for part in parts:
            if part is not None:
                part.close()

    # Inside.

    def _assemble(self, layers: nn.Module | Sequence[Layer]) -> Assembly:
        try:
            with self._progress.during(START_UP):
                return assemble(layers, self._request, self._peers)
        except PipeSwiftError:
            # All ranks raise it, so none has failed the others.
            if self._watchdog:
                self._watchdog.close()
            raise

    def _make_executor(self, schedule: Schedule) -> Executor:
        return Executor(
            schedule,
            self.rank,
            self.stages,
            self._wiring,
            on_backward=self._asynchronous.after if self._asynchronous else self._accumulation.fold,
            grad_ready=self._grad_ready,
            progress=self._progress,
            batched_weight_gradients=self._batched,
            lanes=self._lanes,
            experts=self._peers.replicas.experts,
        )

    def _grad_ready(self, stage: Stage) -> None:
        for hook in self._ready_hooks:
            hook(stage)
        self._reducer.stage_done(stage.index)

    def _run(self, executor: Executor, job: Job, outputs: Where | None, losses: Where) -> tuple[Result, float | None]:
        """Runs a job; also gives the global count when the loss function gives (sum, count)."""
        schedule, training = executor.schedule, not executor.schedule.forward_only
        collected = Losses(self._peers, self._last_stage_ranks, schedule.num_microbatches, losses)
        self._modes.set((layer for stage in self.stages.values() for layer in stage.layers()), training)
        recorder = executor.run(job, self._steering.helm(schedule))
        recorder.info = self._granularity.info()
        if training and self._asynchronous:
            self._asynchronous.record(recorder, self.rank)
        told = [counter for stage in self.stages.values() for counter in stage.auxiliary.counters(self.rank)]
        recorder.counters = (*recorder.counters, *told, *self._steering.counters())
        with self._progress.joining("the losses"):
            table = collected.collect(job)
        with self._progress.joining("the outputs"):
            kept = collect_outputs(self._peers, job, outputs)
        loss, count = total(table)
        known = bool(table[:, 1].any())
        result = Result(
            loss if known else None,
            tuple(table[:, 0].tolist()) if known else (),
            kept,
            {layer: seen for stage in self.stages.values() for layer, seen in stage.auxiliary.collect().items()},
            recorder,
            schedule.name,
        )
        return result, count
