"""From a program to what the host calls, one call after the other, with one rank's stages, exchanges and channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeswift.ir import Action, Op, Product, Schedule
from pipeswift.program import Kind, Lane, Part, Program, Work
from pipeswift.runtime.batch import unlike
from pipeswift.runtime.boundary import Flat, map_tensors
from pipeswift.runtime.channel import Expected, Receiver, Sender
from pipeswift.runtime.exchange import Exchange
from pipeswift.runtime.foresight import shapes_of
from pipeswift.runtime.lanes import Lanes, Launched
from pipeswift.runtime.loss import StepLoss
from pipeswift.runtime.recorder import Recorder
from pipeswift.runtime.stage import Entry, Stage
from pipeswift.runtime.wiring import ChannelKey, Wiring


@dataclass
class Job:
    """What one step works on; inputs and arguments by micro-batch, inputs on the ranks that hold the first stage.

    order: the caller's number of each micro-batch, where they enter in another order than they came in.
    """

    key: int  # seeds the step's random numbers
    step: int = 0  # how many came before
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
ChannelEnd = TypeVar("ChannelEnd", Sender, Receiver)
_TIMED = (Kind.COMPUTE, Kind.WAIT)


class Bound(NamedTuple):
    """A call of a program. number: of the pass that it is for. spans: the work whose span it records, if any."""

    lane: Lane
    number: int
    call: Call
    spans: Work | None


class Calls:
    """Binds programs. job, recorder: of the step that runs.

    together: for the last W of a run of them, by (stage, micro-batch), the micro-batches whose work it does at once.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        lanes: Lanes,
        together: Mapping[tuple[int, int], Sequence[int]] | None,
    ):
        self._schedule, self._stages, self._wiring, self._lanes = schedule, stages, wiring, lanes
        self._together = together
        self._last = schedule.num_stages - 1
        self._here: dict[tuple[Product, int, int], Any] = {}  # products that stay on this rank
        self.job = Job(key=0)
        self.recorder = Recorder(0, schedule.num_ranks, 0)

    def begin(self, job: Job, recorder: Recorder) -> None:
        self.job, self.recorder = job, recorder
        if self._last in self._stages:
            self._stages[self._last].tail = self._tail

    def bind(self, program: Program) -> tuple[Bound, ...]:
        """A call for each step. The micro-batch of an action in `program` is the number of its pass, from 0."""
        return tuple(
            Bound(work.lane, work.action.microbatch, self._bind(kind, work), work if kind in _TIMED else None)
            for kind, work in program.steps
        )

    # One method per kind of step and op.

    def _bind(self, kind: Kind, work: Work) -> Call:
        stage, op, _ = work.action
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
        return _chain((*self._begins(work), *self._runs(work)))

    def _begins(self, work: Work) -> tuple[Call, ...]:
        """What a pass starts from, where no other stage has made it."""
        stage, op, _ = work.action
        if op is Op.F:
            return (self._load,) if stage == work.segment == 0 and work.part is not Part.MERGE else ()
        top = stage == self._last and work.segment == len(self._stages[stage].forms) - 1
        return (self._seed,) if top and op is not Op.W and work.part is not Part.ATTENTION else ()

    def _runs(self, work: Work) -> tuple[Call, ...]:
        """The segments of a stage that a work runs, and what it hands to, and takes from, the exchange beside them."""
        stage, op, _ = work.action
        before = self._compute(stage, 2 * work.segment, work.op)
        if work.part is Part.LAYERS or work.op is Op.W:
            return (before,)
        exchange = self._stages[stage].exchanges[work.segment]
        enters, leaves = self._enter(exchange, op), self._leave(exchange, op)
        if work.part is Part.ATTENTION:
            return (before, enters) if op is Op.F else (leaves, before)
        # What adds up has no weights: its I is its whole backward.
        after = self._compute(stage, 2 * work.segment + 1, Op.F if op is Op.F else Op.B)
        return (leaves, after) if op is Op.F else (after, enters)

    def _load(self, work: Pass) -> None:
        work.value = self.job.inputs[work.microbatch]

    def _seed(self, work: Pass) -> None:
        assert self.job.loss is not None
        work.value = (self.job.loss.seed(work.microbatch),)

    def _tail(self, microbatch: int, output: Any) -> Any:
        """What becomes of the model's output."""
        if self.job.keep_outputs:
            self.job.outputs[microbatch] = map_tensors(torch.Tensor.detach, output)
        return None if self.job.loss is None else self.job.loss(microbatch, output)

    def _take(self, product: Product, maker: int) -> Call:
        boundary = maker if product is Product.OUTPUT else maker - 1
        receivers = self._by_microbatch(self._wiring.receivers, boundary, product)

        def take(work: Pass) -> None:
            receiver = receivers[work.microbatch]
            if receiver is None:
                work.value = self._here.pop((product, maker, work.microbatch))
            else:
                work.value = receiver.take(work.microbatch)
                if product is Product.OUTPUT:
                    self.job.uniform = receiver.uniform

        return take

    def _compute(self, stage: int, segment: int, op: Op) -> Call:
        piece = self._stages[stage]

        def forward(work: Pass) -> None:
            arguments = self.job.arguments[work.microbatch] if self.job.arguments else {}
            flat: Flat = work.value
            weight = self.job.scale * flat.samples / max(1, flat.batch)
            number = self.job.first + work.microbatch
            entry = Entry(work.microbatch, self.job.key, arguments, number, weight, self.job.step)
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
        if (samples := self.job.samples) is not None and samples[work.microbatch] != work.value.samples:
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
            self.recorder.span(work.action, launched.start, launched.end, part.lane)

        return wait

    def _send_output(self, stage: int) -> Call:
        senders = self._by_microbatch(self._wiring.senders, stage, Product.OUTPUT)
        receivers = self._by_microbatch(self._wiring.receivers, stage, Product.GRADIENT)

        def send(work: Pass) -> None:
            output: Flat = work.value
            sender = senders[work.microbatch]
            if sender is None:
                # A copy, since the next stage may change its input in place and this one's graph may need it.
                copies = tuple(tensor.clone() for tensor in output.tensors)
                self._here[Product.OUTPUT, stage, work.microbatch] = output._replace(tensors=copies)
                return
            sender.send(output, self.job.uniform)
            if not self._schedule.forward_only:
                self._expect_gradients(receivers, work.microbatch, output)

        return send

    def _expect_gradients(self, receivers: Sequence[Receiver | None], microbatch: int, output: Flat) -> None:
        """Announces the gradient of an output; of all outputs of the route at once when they are alike."""
        route_of = self._schedule.route_of
        if not self.job.uniform:
            due = [microbatch]
        elif microbatch == route_of.index(route_of[microbatch]):
            due = [i for i, route in enumerate(route_of) if route == route_of[microbatch]]
        else:
            return
        shapes = shapes_of(output.spec.differentiable())
        receiver = receivers[microbatch]
        assert receiver is not None, "what goes to another rank comes back from there"
        for number in due:
            receiver.expect(Expected(number, shapes))

    def _send_gradient(self, stage: int) -> Call:
        senders = self._by_microbatch(self._wiring.senders, stage - 1, Product.GRADIENT)

        def send(work: Pass) -> None:
            gradients: tuple[Tensor, ...] = work.value
            sender = senders[work.microbatch]
            if sender is None:
                self._here[Product.GRADIENT, stage, work.microbatch] = gradients
            else:
                sender.send_tensors(gradients)

        return send

    def _by_microbatch(
        self, ends: Mapping[ChannelKey, ChannelEnd], boundary: int, product: Product
    ) -> list[ChannelEnd | None]:
        """This rank's end of the channel by which each crosses a boundary; None where both stages are on this rank."""
        return [ends.get(ChannelKey(boundary, product, route)) for route in self._schedule.route_of]


def join(calls: Sequence[Bound]) -> tuple[Bound, ...]:
    """Neighbouring calls of one pass become one, so that they share a span; launches and waits stay apart."""
    joined: list[Bound] = []
    for (lane, _), group in groupby(calls, key=itemgetter(0, 1)):
        first, *rest = group
        if lane is Lane.ALL_TO_ALL:
            joined += (first, *rest)
        else:
            joined.append(first._replace(call=_chain((first.call, *(bound.call for bound in rest)))))
    return tuple(joined)


def _chain(members: tuple[Call, ...]) -> Call:
    if len(members) == 1:
        return members[0]

    def chain(work: Pass) -> None:
        for member in members:
            member(work)

    return chain
