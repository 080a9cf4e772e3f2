"""One stage on one rank: a contiguous piece of the model, run one micro-batch and one pass at a time."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeswift.ir import Op
from pipeswift.program import WHOLE, Form, Grain
from pipeswift.runtime.auxiliary import Auxiliary
from pipeswift.runtime.backward import attach
from pipeswift.runtime.boundary import Flat, flatten, unflatten
from pipeswift.runtime.context import Place, forget, mark, skips
from pipeswift.runtime.engine import edge_of, inner, run_backward
from pipeswift.runtime.exchange import Exchange
from pipeswift.runtime.ledger import Ledger
from pipeswift.runtime.pending import Pending, joined, weight_gradients
from pipeswift.runtime.seeds import generator_of, mix
from pipeswift.runtime.shelf import Shelf

logger = logging.getLogger("pipeswift")


class Entry(NamedTuple):
    """What a pass needs besides its input. key: of (seed, step). arguments: keyword arguments for layers, by name.

    number: the micro-batch's, among those of all replicas; it keys the random numbers.
    weight: with which the micro-batch's auxiliary losses count. step: how many steps came before.
    """

    microbatch: int
    key: int
    arguments: Mapping[str, Any]
    number: int = 0
    weight: float = 0.0
    step: int = 0


class Named(NamedTuple):
    """A layer, or a part of one that other parts run apart from. number: what its random numbers are keyed by."""

    name: str
    number: int
    layer: nn.Module


class Crossing(NamedTuple):
    """What crosses between segments: a value, and what earlier layers have put aside for later ones."""

    value: Any
    skips: dict[str, Any]


class Segment:
    """Layers that run without a break; segments of a stage are separate pieces of the autograd graph."""

    def __init__(self, members: Sequence[Named], device: torch.device):
        self.names, self.numbers, self.layers = zip(*members, strict=True)
        self.takes = tuple(_keywords(layer) for layer in self.layers)
        self._keyed = [any(getattr(part, "keyed", False) for part in layer.modules()) for layer in self.layers]
        self._generator = generator_of(device)

    def __call__(self, value: Any, entry: Entry, first_sample: int, seeds: list[int]) -> Any:
        """Runs the layers; each draws its random numbers from a seed of its own and gets the arguments it names.

        seeds: gets those that stand for places in the batch until the micro-batch's backward is done.
        """
        key = mix(entry.key, entry.number)
        for layer, takes, number, keyed in zip(self.layers, self.takes, self.numbers, self._keyed, strict=True):
            seed = mix(key, number)
            self._generator.manual_seed(seed)
            if keyed:
                mark(seed, Place(entry.key, number, first_sample, 0, seeds, entry.step, entry.microbatch))
            if takes and entry.arguments:
                value = layer(value, **{name: entry.arguments[name] for name in takes if name in entry.arguments})
            else:
                value = layer(value)
        return value

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, layer in zip(self.names, self.layers, strict=True):
            yield from layer.named_parameters(prefix=name)


class Record:
    """What a micro-batch leaves on a stage between its forward and its backward, per segment."""

    __slots__ = ("entered", "left", "seeds", "step", "weight")

    def __init__(self, segments: int, entry: Entry):
        self.step = entry.step
        self.weight = entry.weight  # of the auxiliary losses
        self.seeds: list[int] = []
        self.entered: list[tuple[Tensor, ...]] = [()] * segments  # leaves that will hold the input's gradient
        self.left: list[tuple[GradientEdge, ...]] = [()] * segments  # where the output's gradient enters the graph


class Stage:
    """Stage `index` of the pipeline: its segments and what is in flight on it.

    layers: by their index in the whole model. exchanges: number s lies between segments 2 s and 2 s + 1; to the stage's
        programs the three are one MoE segment, s. grain: in how many chunks these segments are.
    tail: what the last stage does with the model's output, (micro-batch, output) -> loss; part of its last segment.
    shelf: the versions of its weights, where it runs on others than the layers' own.
    auxiliary: where its layers tell of losses and figures of their own.
    """

    def __init__(
        self,
        index: int,
        layers: Mapping[int, nn.Module],
        segments: Sequence[Segment],
        exchanges: Sequence[Exchange] = (),
        grain: Grain = WHOLE,
    ):
        self.index = index
        self._layers = layers
        self.segments = tuple(segments)
        self.exchanges = tuple(exchanges)
        self.grain = grain
        self.auxiliary = Auxiliary()
        self.tail: Callable[[int, Any], Any] | None = None
        self.shelf: Shelf | None = None
        self.ledger: Ledger | None = None  # once the backward can be split
        self._told: set[int] = set()  # segments of which it is known what no rule covers
        self._records: dict[int, Record] = {}
        self._pendings: dict[tuple[int, int], list[Pending]] = {}  # by (micro-batch, segment), between I and W

    def prepare_split(self) -> None:
        """Makes I and W possible, from the next forward on; whole backwards stay what they are."""
        if self.ledger is None:
            self.ledger = Ledger()
            # One list, so that what layers share is prepared once; exchanges split theirs anyway.
            attach(nn.ModuleList(layer for segment in self.segments for layer in segment.layers), self.ledger)

    def regroup(self, grain: Grain) -> None:
        """Between steps: from the next pass on its experts are cut so."""
        self.grain = grain
        for exchange in self.exchanges:
            exchange.regroup(grain)

    def bind(self, op: Op, microbatch: int) -> None:
        """Before every pass: from here to the next one the layers run on the weights that this pass uses."""
        if self.shelf is not None:
            self.shelf.bind(op, microbatch)

    def forward(self, segment: int, entry: Entry, flat: Flat) -> Flat:
        """One segment's F. Keeps what the backward needs, and of the output no more than its place in the graph."""
        leaves = tuple(
            tensor.detach().requires_grad_(meta.needs_grad)
            for tensor, meta in zip(flat.tensors, flat.spec.tensors, strict=True)
        )
        seeds: list[int] = []
        self.auxiliary.during_forward(entry.microbatch, entry.weight)
        self.bind(Op.F, entry.microbatch)
        out = self._run(segment, entry, flat, tuple(map(inner, leaves)), seeds)
        if not torch.is_grad_enabled():
            forget(seeds)
        else:
            record = self._records.setdefault(entry.microbatch, Record(len(self.segments), entry))
            record.seeds += seeds
            record.entered[segment] = tuple(leaf for leaf in leaves if leaf.requires_grad)
            record.left[segment] = tuple(edge_of(tensor) for tensor in out.tensors if tensor.requires_grad)
        return flat._replace(tensors=tuple(tensor.detach() for tensor in out.tensors), spec=out.spec)

    def backward(self, segment: int, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One segment's B: accumulates into the parameters, returns the gradients of what entered, in order.

        gradients: one per output tensor that needs a gradient. An input that the graph did not use gets zeros.
        """
        record = self._records[microbatch]
        left, record.left[segment] = record.left[segment], ()
        entered, record.entered[segment] = record.entered[segment], ()
        self.bind(Op.B, microbatch)
        self.auxiliary.during_backward(record.weight)
        if left:
            run_backward(left, tuple(gradients))
        if segment == 0:
            forget(record.seeds)
            del self._records[microbatch]
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in entered)

    def input_gradient(self, segment: int, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One segment's I: as `backward`, but gradients of weights are left for W wherever that is possible."""
        assert self.ledger is not None
        record = self._records[microbatch]
        when = record.step if self.shelf is None else (record.step, microbatch)  # every version has weights of its own
        with self.ledger.leaving(segment, record.left[segment], when) as pendings:
            made = self.backward(segment, microbatch, gradients)
        self._pendings[microbatch, segment] = pendings
        if segment not in self._told:
            self._told.add(segment)
            deferred = [self.ledger.stand_in(w) for left in pendings for w in left.parameters if w is not None]
            _tell_what_stays_in_i(self.index, dict(self.segments[segment].named_parameters()), deferred)
        return made

    def weight_gradient(self, segment: int, microbatch: int) -> None:
        """One segment's W: accumulates into the parameters what its I has left."""
        self.bind(Op.W, microbatch)
        weight_gradients(self._pendings.pop((microbatch, segment)))

    def weight_gradients(self, segment: int, microbatches: Sequence[int]) -> None:
        """One segment's W of several micro-batches at once, one product for all where the operation allows it."""
        weight_gradients(joined([left for i in microbatches for left in self._pendings.pop((i, segment))]))

    def deferred(self, segment: int, microbatch: int) -> list[Tensor]:
        """What one segment's I has left for W, as the tensors that are kept for it."""
        return [tensor for pending in self._pendings[microbatch, segment] for tensor in (pending.x, pending.gradient)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter); the name starts with the layer's index in the whole model."""
        for number, segment in enumerate(self.segments):
            yield from segment.named_parameters()
            if number % 2 == 0 and number // 2 < len(self.exchanges):
                yield from self.exchanges[number // 2].named_parameters()

    def layers(self) -> Iterator[nn.Module]:
        yield from self._layers.values()

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """(index in the whole model, layer)."""
        yield from self._layers.items()

    @property
    def forms(self) -> tuple[Form, ...]:
        """What its programs are made of."""
        last = (Form.DENSE,) if len(self.segments) > 2 * len(self.exchanges) else ()
        return tuple(exchange.form for exchange in self.exchanges) + last

    def _run(self, segment: int, entry: Entry, flat: Flat, tensors: tuple[Tensor, ...], seeds: list[int]) -> Flat:
        value = unflatten(flat._replace(tensors=tensors))
        value, skips.values = value if isinstance(value, Crossing) else (value, {})
        value = self.segments[segment](value, entry, flat.first_sample, seeds)
        aside, skips.values = skips.values, {}
        if self.tail is not None and segment == len(self.segments) - 1:
            value = self.tail(entry.microbatch, value)
        return flatten(Crossing(value, aside) if aside else value)


def _tell_what_stays_in_i(stage: int, parameters: Mapping[str, nn.Parameter], deferred: Sequence[Tensor]) -> None:
    """Says, once, which parameters get their gradient in I after all; a warning when they are more than a tenth."""
    waiting = set(map(id, deferred))
    trained = {name: weight for name, weight in parameters.items() if weight.requires_grad}
    rest = {name: weight for name, weight in trained.items() if id(weight) not in waiting}
    share = sum(weight.numel() for weight in rest.values()) / max(1, sum(w.numel() for w in trained.values()))
    if rest:
        names = ", ".join(rest)
        logger.log(
            logging.WARNING if share > 0.1 else logging.INFO,
            f"stage {stage}: {share:.1%} of what it trains gets its gradient in I, since not all of its uses have a "
            f"form for W: {names}",
        )


def _keywords(layer: nn.Module) -> tuple[str, ...]:
    """The arguments that the layer's forward takes by name, after the first."""
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())[1:]
    except ValueError:
        return ()  # a compiled forward, such as TorchScript's, does not show its arguments
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters if parameter.kind in named)
