"""Runs one rank's part of a step: asks the policy what to start, runs it, sleeps when there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import inf
from operator import itemgetter
from queue import Empty
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeswift.ir import Action, Op, Overlap, Product, Schedule, parts
from pipeswift.passes import weight_runs
from pipeswift.policy import Ready, View
from pipeswift.program import Kind, Lane, Part, Step, Work, chunk, compile_action
from pipeswift.runtime.batch import unlike
from pipeswift.runtime.boundary import Flat, map_tensors
from pipeswift.runtime.channel import Expected
from pipeswift.runtime.cuts import Chunks
from pipeswift.runtime.exchange import Exchange
from pipeswift.runtime.lanes import Lanes, Launched
from pipeswift.runtime.loss import StepLoss
from pipeswift.runtime.progress import Progress, Run
from pipeswift.runtime.recorder import Recorder, clock
from pipeswift.runtime.stage import Entry, Stage
from pipeswift.runtime.steering import Helm
from pipeswift.runtime.wiring import ChannelKey, Wiring


@dataclass
class Job:
    """What one step works on; inputs and arguments by micro-batch, inputs on the ranks that hold the first stage.

    order: the caller's number of each micro-batch, where they enter in another order than they came in.
    """

    key: int  # seeds the step's random numbers
    first: int = 0  # the number of micro-batch 0 among those of all replicas
    inputs: Sequence[Flat] = ()
    arguments: Sequence[Mapping[str, Any]] = ()
    uniform: bool = True  # all inputs have one form
    scale: float = 1.0  # on the loss
    loss: StepLoss | None = None  # on the ranks that hold the last stage
    samples: Sequence[int] | None = None  # that each micro-batch's targets have; None: the caller has cut them
    order: Sequence[int] | None = None
    keep_outputs: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)  # by micro-batch, on the ranks that hold the last stage


class Pass:
    """One action under way: its micro-batch, and what its steps hand to each other."""

    __slots__ = ("action", "launched", "microbatch", "value")

    def __init__(self, action: Action):
        self.action, self.microbatch = action, action.microbatch
        self.value: Any = None
        self.launched: dict[Work, Launched] = {}


Call = Callable[[Pass], None]


class Executor:
    """One rank's runner of one schedule. Each (stage, op) is compiled once to a list of bound calls."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        on_backward: Callable[[Action], None],
        grad_ready: Callable[[Stage], None],
        progress: Progress,
        lanes: Lanes,
        expert_chunks: Chunks,
        batched_weight_gradients: bool = False,
    ):
        self.schedule, self.rank = schedule, rank
        self._lanes, self._expert_chunks = lanes, expert_chunks
        self._stages, self._wiring = stages, wiring
        self._on_backward, self._grad_ready = on_backward, grad_ready
        self._progress = progress
        self._last = schedule.num_stages - 1
        self._backwards = dict.fromkeys(stages, 0)  # by stage, in one step
        for route, stage in schedule.stages_on(rank):
            self._backwards[stage] += schedule.route_of.count(route)
        self._here: dict[tuple[Product, int, int], Any] = {}  # products that stay on this rank
        self._job = Job(key=0)
        self._together = _by_last(weight_runs(schedule.orders[rank])) if batched_weight_gradients else None
        ops = sorted({Op(op) for order in schedule.orders for op in np.unique(order.rows[:, 1])})
        if schedule.splits_backward:
            for stage in stages.values():
                stage.prepare_split()
        self._programs = {(stage, op): self._compile(stage, op) for stage in stages for op in ops}
        self._spans = sum(self._spans_of(stage, Op(op)) for stage, op, _ in schedule.orders[rank].rows.tolist())
        self._recorder = Recorder(rank, schedule.num_ranks, 0)

    def run(self, job: Job, helm: Helm) -> Recorder:
        """One step, in which `helm` decides. Raises whatever a layer, the loss or a channel raised."""
        self._job = job
        if self._last in self._stages:
            self._stages[self._last].tail = self._tail
        self._wiring.begin(self.schedule)
        ready = Ready(self.schedule, self.rank, helm.slots)
        backwards = dict(self._backwards)  # still to come, by stage
        run = self._progress.run = Run(self.schedule, self.rank, ready)
        self._recorder = recorder = Recorder(self.rank, self.schedule.num_ranks, self._spans)
        for entry in self._decisions(ready, helm):
            for action in parts(entry):
                run.started.append(action)
                self._run(action, ready)
                run.ended += 1
                self._account(action, backwards)
        self._wiring.end()
        if helm.lookout:
            recorder.counters = helm.lookout.counters(clock())
        return recorder

    def _decisions(self, ready: Ready, helm: Helm) -> Iterator[Action | Overlap]:
        """What to run, one entry after the other: each is over when the next is asked for."""
        policy, inbox, started, idle_since = helm.policy, self._wiring.inbox, 0, clock()
        watch = helm.lookout
        if watch:
            watch.begin_step()
        while not ready.finished:
            while not inbox.empty():
                self._arrive(ready, inbox.get())
            now = clock()
            if watch:
                watch.look(now)
            decision = policy.next(ready, View(self.rank, now, started, idle_since, watch and watch.monitor))
            if watch:
                watch.note(now, decision, ready.depth)
            entry = decision.entry
            if entry is None:
                self._await_arrival(ready, decision.until)
                continue
            started += 1
            if watch:
                watch.begin(parts(entry)[0], now, ready.depth)
            yield entry
            idle_since = clock()
            if watch:
                watch.end(parts(entry)[0], idle_since - now)

    def _await_arrival(self, ready: Ready, until: float) -> None:
        """Sleeps until something arrives, or `until`."""
        timeout = max(until - clock(), 0.0) if until < inf else None
        with suppress(Empty):
            self._arrive(ready, self._wiring.inbox.get(timeout=timeout))

    def close(self) -> None:
        """Lets go of stages and channels, so that they end with their last user and not at some garbage collection."""
        self._programs.clear()
        for stage in self._stages.values():
            stage.tail = None

    def _run(self, action: Action, ready: Ready) -> None:
        ready.start(action)
        work = Pass(action)
        for lane, call in self._programs[action.stage, action.op]:
            if lane is Lane.COMPUTE:
                start = clock()
                call(work)
                self._recorder.span(action, start, clock())
            else:
                call(work)
        ready.finish(action)

    def _spans_of(self, stage: int, op: Op) -> int:
        """How many spans a pass records at most: one per compute call, and one per wait."""
        return sum(lane is not Lane.POINT_TO_POINT for lane, _ in self._programs[stage, op])

    def _account(self, action: Action, backwards: dict[int, int]) -> None:
        """Tells the owner of the weights that a backward has added to gradients, and when a stage's are complete."""
        if action.op is Op.F:
            return
        self._on_backward(action)
        if action.op is not Op.I:
            backwards[action.stage] -= 1
            if not backwards[action.stage]:
                self._grad_ready(self._stages[action.stage])

    def _arrive(self, ready: Ready, arrival: Any) -> None:
        if isinstance(arrival, BaseException):
            raise arrival
        ready.arrive(arrival.product, arrival.stage, arrival.microbatch)

    # How an action becomes calls: one method per kind of step and op.

    def _compile(self, stage: int, op: Op) -> tuple[tuple[Lane, Call], ...]:
        downstream, upstream = stage < self._last, stage > 0
        takes, sends = (upstream, downstream) if op is Op.F else (downstream, upstream)
        program = compile_action(Action(stage, op, 0), layout=self._stages[stage].forms, takes=takes, sends=sends)
        if self._stages[stage].exchanges and op is not Op.W:
            program = chunk(program, self._expert_chunks[op is not Op.F], local_first=True)
        calls = [(step.lane, self._bind(step, stage, op)) for step in program.steps]
        if op is Op.F and not upstream:
            calls.insert(0, (Lane.POINT_TO_POINT, self._load))
        if op in (Op.B, Op.I) and not downstream:
            calls.insert(0, (Lane.COMPUTE, self._seed))
        return _join(calls)

    def _bind(self, step: Step, stage: int, op: Op) -> Call:
        kind, work = step
        if kind is Kind.TAKE:
            return self._take(Product.OUTPUT, stage - 1) if op is Op.F else self._take(Product.GRADIENT, stage + 1)
        if kind is Kind.SEND:
            return self._send_output(stage) if op is Op.F else self._send_gradient(stage)
        if kind is Kind.LAUNCH:
            return self._launch(self._stages[stage].exchanges[work.segment], work)
        if kind is Kind.WAIT:
            return self._wait(work)
        if work.part in (Part.EXPERTS, Part.SHARED):
            return self._exchange(stage, work)
        before = self._compute(stage, 2 * work.segment, work.op)
        if work.part is Part.LAYERS or work.op is Op.W:
            return before
        exchange = self._stages[stage].exchanges[work.segment]
        enters, leaves = self._enter(exchange, op), self._leave(exchange, op)
        if work.part is Part.ATTENTION:
            return _chain((before, enters) if op is Op.F else (leaves, before))
        # What adds up has no weights: its I is its whole backward.
        after = self._compute(stage, 2 * work.segment + 1, Op.F if op is Op.F else Op.B)
        return _chain((leaves, after) if op is Op.F else (after, enters))

    def _load(self, work: Pass) -> None:
        work.value = self._job.inputs[work.microbatch]

    def _seed(self, work: Pass) -> None:
        assert self._job.loss is not None
        work.value = (self._job.loss.seed(work.microbatch),)

    def _tail(self, microbatch: int, output: Any) -> Any:
        """What becomes of the model's output."""
        if self._job.keep_outputs:
            self._job.outputs[microbatch] = map_tensors(torch.Tensor.detach, output)
        return None if self._job.loss is None else self._job.loss(microbatch, output)

    def _take(self, product: Product, maker: int) -> Call:
        boundary = maker if product is Product.OUTPUT else maker - 1

        def take(work: Pass) -> None:
            receiver = self._wiring.receivers.get(self._key(boundary, product, work.microbatch))
            if receiver is None:
                work.value = self._here.pop((product, maker, work.microbatch))
            else:
                work.value = receiver.take(work.microbatch)
                if product is Product.OUTPUT:
                    self._job.uniform = receiver.uniform

        return take

    def _compute(self, stage: int, segment: int, op: Op) -> Call:
        piece = self._stages[stage]

        def forward(work: Pass) -> None:
            arguments = self._job.arguments[work.microbatch] if self._job.arguments else {}
            flat: Flat = work.value
            weight = self._job.scale * flat.samples / max(1, flat.batch)
            entry = Entry(work.microbatch, self._job.key, arguments, self._job.first + work.microbatch, weight)
            if stage == self._last:
                self._check_samples(work)
            work.value = piece.forward(segment, entry, work.value)

        def input_gradient(work: Pass) -> None:
            work.value = piece.input_gradient(segment, work.microbatch, work.value)

        def weight_gradient(work: Pass) -> None:
            if self._together is None:
                piece.weight_gradient(segment, work.microbatch)
            else:
                piece.weight_gradients(segment, self._together.get((stage, work.microbatch), ()))

        def backward(work: Pass) -> None:
            work.value = piece.backward(segment, work.microbatch, work.value)

        return (forward, input_gradient, weight_gradient, backward)[op]

    def _check_samples(self, work: Pass) -> None:
        """Inputs and targets may have come into the pipeline on different ranks."""
        if (samples := self._job.samples) is not None and samples[work.microbatch] != work.value.samples:
            raise unlike(work.value.samples, samples[work.microbatch], f"micro-batch {work.microbatch}: ")

    def _enter(self, exchange: Exchange, op: Op) -> Call:
        return lambda work: exchange.enter(op, work.microbatch, work.value)

    def _leave(self, exchange: Exchange, op: Op) -> Call:
        def leave(work: Pass) -> None:
            work.value = exchange.leave(op, work.microbatch)

        return leave

    def _exchange(self, stage: int, part: Work) -> Call:
        exchange = self._stages[stage].exchanges[part.segment]

        def weight_gradient(work: Pass) -> None:
            due = None if self._together is None else self._together.get((stage, work.microbatch), ())
            for microbatch in (work.microbatch,) if due is None else due:
                exchange.run(part, microbatch)

        return weight_gradient if part.action.op is Op.W else lambda work: exchange.run(part, work.microbatch)

    def _launch(self, exchange: Exchange, part: Work) -> Call:
        def launch(work: Pass) -> None:
            work.launched[part] = self._lanes.launch(part.lane, partial(exchange.run, part, work.microbatch))

        return launch

    def _wait(self, part: Work) -> Call:
        def wait(work: Pass) -> None:
            launched = work.launched.pop(part)
            self._lanes.wait(part._replace(action=work.action), launched)
            self._recorder.span(work.action, launched.start, launched.end, part.lane)

        return wait

    def _send_output(self, stage: int) -> Call:
        def send(work: Pass) -> None:
            output: Flat = work.value
            sender = self._wiring.senders.get(self._key(stage, Product.OUTPUT, work.microbatch))
            if sender is None:
                # A copy, since the next stage may change its input in place and this one's graph may need it.
                copies = tuple(tensor.clone() for tensor in output.tensors)
                self._here[Product.OUTPUT, stage, work.microbatch] = output._replace(tensors=copies)
                return
            sender.send(output, self._job.uniform)
            if not self.schedule.forward_only:
                self._expect_gradients(stage, work.microbatch, output)

        return send

    def _expect_gradients(self, stage: int, microbatch: int, output: Flat) -> None:
        """Announces the gradient of an output; of all outputs of the route at once when they are alike."""
        receiver = self._wiring.receivers[self._key(stage, Product.GRADIENT, microbatch)]
        metas = output.spec.differentiable()
        if not self._job.uniform:
            receiver.expect(Expected(microbatch, metas))
            return
        route_of = self.schedule.route_of
        if microbatch == route_of.index(route_of[microbatch]):
            for i, route in enumerate(route_of):
                if route == route_of[microbatch]:
                    receiver.expect(Expected(i, metas))

    def _send_gradient(self, stage: int) -> Call:
        def send(work: Pass) -> None:
            gradients: tuple[Tensor, ...] = work.value
            sender = self._wiring.senders.get(self._key(stage - 1, Product.GRADIENT, work.microbatch))
            if sender is None:
                self._here[Product.GRADIENT, stage, work.microbatch] = gradients
            else:
                sender.send_tensors(gradients)

        return send

    def _key(self, boundary: int, product: Product, microbatch: int) -> ChannelKey:
        return ChannelKey(boundary, product, self.schedule.route_of[microbatch])


def _by_last(runs: Sequence[tuple[int, tuple[int, ...]]]) -> dict[tuple[int, int], tuple[int, ...]]:
    """For the last W of each run, (stage, micro-batch), the micro-batches whose work it does."""
    return {(stage, microbatches[-1]): microbatches for stage, microbatches in runs}


def _join(calls: Sequence[tuple[Lane, Call]]) -> tuple[tuple[Lane, Call], ...]:
    """Neighbouring calls on one lane become one, so that they share a span; launches and waits stay apart."""
    joined: list[tuple[Lane, Call]] = []
    for lane, group in groupby(calls, key=itemgetter(0)):
        members = tuple(call for _, call in group)
        if lane is Lane.ALL_TO_ALL:
            joined += ((lane, member) for member in members)
        else:
            joined.append((lane, members[0] if len(members) == 1 else _chain(members)))
    return tuple(joined)


def _chain(members: tuple[Call, ...]) -> Call:
    def chain(work: Pass) -> None:
        for member in members:
            member(work)

    return chain
