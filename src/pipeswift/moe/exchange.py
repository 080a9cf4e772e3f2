"""Dispatch and combine: rows travel to the ranks that hold their experts, and back, in chunks of experts.

A rank's experts are cut into ranges, the longest that no chunk of a forward or of a backward cuts. Of each range, the
rows of this rank and those of all others are computed apart, and each of the two is a piece of the autograd graph by
itself; so a backward may go through them in other chunks than its forward did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeswift.ir import Action, Op
from pipeswift.moe.rehearsal import LEAST, REPEAT, SHARES, Load, gradients_aside, seconds_of
from pipeswift.moe.routed import Routed
from pipeswift.program import LOCAL, WHOLE, BlockCosts, Form, Grain, Lane, Line, Part, Work
from pipeswift.runtime.backward import attach
from pipeswift.runtime.boundary import Flat, unflatten
from pipeswift.runtime.engine import edge_of, inner, run_backward
from pipeswift.runtime.groups import Group
from pipeswift.runtime.lanes import Lanes, handshake
from pipeswift.runtime.ledger import Ledger
from pipeswift.runtime.pending import Pending, weight_gradients
from pipeswift.runtime.seeds import seeded

Rows = list[list[Tensor]]  # [rank of the group][local expert]: rows that go there, or that come from there
Counts = list[list[int]]
_LOADS = 64  # micro-batches whose loads it remembers


class Unit(NamedTuple):
    """Local experts low to high - 1, for this rank's own rows, or for those of all others."""

    own: bool
    low: int
    high: int


class Node(NamedTuple):
    """A piece of the autograd graph: the leaf that went in, and where the gradient of what came out enters."""

    leaf: Tensor
    edge: GradientEdge


class Transit:
    """One micro-batch at one layer, from its forward to the end of its backward."""

    def __init__(self, flat: Flat, ranks: int):
        self.flat = flat
        self.numbers = _routed(flat._replace(tensors=range(len(flat.tensors))))  # which tensor is which
        routed = _routed(flat)
        self.shared = routed.shared
        self.sent: Counts = routed.counts.view(ranks, -1).tolist()
        self.received: Counts = []
        self.nodes: dict[Unit | None, Node] = {}  # None: the shared expert
        self.pendings: dict[Unit | None, list[Pending]] = {}
        self.entering: tuple[int, ...] = ()  # the tensors whose gradients a backward begins with
        self.gradients: dict[int, Tensor] = {}  # by tensor
        self.depart(routed.rows)

    def depart(self, rows: Tensor) -> None:
        """A pass begins, with rows sorted by slot: `going` to experts, `coming` to those here, back `home`."""
        pieces = iter(rows.split([size for row in self.sent for size in row]))
        self.going: Rows = [[next(pieces) for _ in row] for row in self.sent]
        self.coming: Rows = [[rows] * len(row) for row in self.sent]
        self.home: Rows = [[rows] * len(row) for row in self.sent]

    def arrive(self) -> Tensor:
        """A pass ends, with rows sorted by slot."""
        rows = torch.cat([piece for row in self.home for piece in row])
        self.going, self.coming, self.home = [], [], []
        return rows


class ExpertExchange:
    """The middle of one MoE segment on one rank; see `pipeswift.runtime.exchange`.

    name: of the layer. experts: the module of those that this rank of `group` holds, `count` of them. A pass may be in
    as many chunks as `grain` says, or in one. payload: the type of rows on their way to experts in a forward, if not
    their own.
    """

    def __init__(
        self,
        name: str,
        experts: nn.Module,
        shared: nn.Module | None,
        count: int,
        group: Group,
        grain: Grain = WHOLE,
        payload: torch.dtype | None = None,
    ):
        self.form = Form.MOE if shared is None else Form.MOE_SHARED
        self.modules = (experts,) if shared is None else (experts, shared)
        self._name, self._experts, self._shared, self._count, self._group = name, experts, shared, count, group
        self._payload = payload
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self.regroup(grain)
        self._loads: deque[Load] = deque(maxlen=_LOADS)
        self._like = torch.empty(0)  # rows as it has seen them
        self._transits: dict[int, Transit] = {}
        self._ledger = Ledger()
        for module in self.modules:
            attach(module, self._ledger)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._experts.named_parameters(prefix=f"{self._name}.experts")
        if self._shared is not None:
            yield from self._shared.named_parameters(prefix=f"{self._name}.shared")

    @property
    def most(self) -> int:
        return self._count

    def regroup(self, grain: Grain) -> None:
        edges = {self._range(chunk, chunks)[0] for chunks in (grain.forward, grain.backward) for chunk in range(chunks)}
        self._ranges = list(pairwise([*sorted(edges), self._count]))

    def measure(self, lanes: Lanes) -> BlockCosts:
        """With even loads, the mean of those seen lately; a chunk of the experts is charged for a launch, too."""
        load = Load.mean([load for theirs in self._group.all_gather(list(self._loads)) for load in theirs])
        with seeded(0), gradients_aside(self.modules):
            exchange = Line.fit(self._time_exchange(load, lanes))
            experts = self._time_experts(load, besides=handshake(lanes))
            others = {} if self._shared is None else self._time_shared(load)
        return BlockCosts(
            exchange,
            load.sent * self._bytes_per_row,
            experts,
            local=load.own / max(load.computed, 1.0),
            counts=8.0 * self._group.size * self._count,
            others=others,
        )

    # A pass begins and ends.

    def enter(self, op: Op, microbatch: int, value: Any) -> None:
        if op is Op.F:
            self._transits[microbatch] = Transit(value, self._group.size)
            return
        transit = self._transits[microbatch]
        transit.gradients = dict(zip(transit.entering, value, strict=True))
        transit.depart(transit.gradients[transit.numbers.rows])

    def leave(self, op: Op, microbatch: int) -> Any:
        transit = self._transits[microbatch]
        if op is Op.F:
            left = _leaving(transit)
            if not torch.is_grad_enabled():
                del self._transits[microbatch]
            return left
        transit.gradients[transit.numbers.rows] = transit.arrive()
        metas = transit.flat.spec.tensors
        gradients = tuple(transit.gradients[number] for number, meta in enumerate(metas) if meta.needs_grad)
        transit.gradients = {}
        self._let_go(microbatch)
        return gradients

    def _let_go(self, microbatch: int) -> None:
        transit = self._transits[microbatch]
        if not (transit.pendings or transit.nodes or transit.gradients):
            del self._transits[microbatch]

    # Its works; those of the all-to-all lane run in that lane's thread.

    def run(self, work: Work, microbatch: int) -> None:
        transit = self._transits[microbatch]
        if work.part is Part.COUNTS:
            self._tell_counts(transit)
        elif work.part is Part.SHARED:
            self._run_shared(work.op, transit)
        elif work.part is Part.EXPERTS and work.op is Op.W:
            for unit in self._units(work):
                weight_gradients(transit.pendings.pop(unit))
        elif work.part is Part.EXPERTS:
            self._run_experts(work, transit)
        elif (work.part is Part.DISPATCH) == (work.op is Op.F):  # in a backward, gradients go the way of `combine`
            self._send(work, transit.going, transit.sent, transit.coming, transit.received)
        else:
            self._send(work, transit.coming, transit.received, transit.home, transit.sent)
        if work.op is Op.W:
            self._let_go(microbatch)

    @torch.no_grad()
    def _tell_counts(self, transit: Transit) -> None:
        sent = torch.tensor(transit.sent)
        received = torch.empty_like(sent)
        self._group.all_to_all(received, sent)
        transit.received = received.tolist()
        me, (own, coming) = self._group.rank, (list(map(sum, table)) for table in (transit.sent, transit.received))
        tokens = 0 if transit.shared is None else len(transit.shared)
        self._loads.append(Load(own[me], sum(coming) - coming[me], sum(own) - own[me], tokens))
        self._like = transit.going[me][0].new_empty(0, transit.going[me][0].shape[1])

    @torch.no_grad()
    def _send(self, work: Work, rows: Rows, sizes: Counts, into: Rows, room: Counts) -> None:
        experts = range(*self._range(work.chunk, work.chunks))
        places = [(rank, expert) for rank in self._others for expert in experts]
        sent = torch.cat([rows[rank][expert] for rank, expert in places])
        splits = [[sum(table[rank][low] for low in experts) for rank in range(len(table))] for table in (room, sizes)]
        for split in splits:
            split[self._group.rank] = 0
        narrow = self._payload if work.part is Part.DISPATCH and work.op is Op.F else None
        leaves = sent.to(narrow or sent.dtype)
        received = leaves.new_empty(sum(splits[0]), leaves.shape[1])
        self._group.all_to_all(received, leaves, *splits)
        pieces = received.to(sent.dtype).split([room[rank][expert] for rank, expert in places])
        for (rank, expert), piece in zip(places, pieces, strict=True):
            into[rank][expert] = piece

    def _run_experts(self, work: Work, transit: Transit) -> None:
        for unit in self._units(work):
            rows, into = (transit.going, transit.home) if unit.own else (transit.coming, transit.coming)
            ranks = [self._group.rank] if unit.own else self._others
            places = [(rank, expert) for expert in range(unit.low, unit.high) for rank in ranks]
            pieces = [rows[rank][expert] for rank, expert in places]
            together = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            if work.op is Op.F:
                sizes = [sum(len(rows[rank][expert]) for rank in ranks) for expert in range(unit.low, unit.high)]
                made, node = _forward(together, lambda leaf: self._experts(leaf, sizes, unit.low))  # noqa: B023
                if node is not None:
                    transit.nodes[unit] = node
            else:
                made = self._backward(transit, unit, together, deferred=True)
            for (rank, expert), piece in zip(places, made.split(list(map(len, pieces))), strict=True):
                into[rank][expert] = piece

    def _run_shared(self, op: Op, transit: Transit) -> None:
        if op is Op.F:
            assert transit.shared is not None
            assert self._shared is not None
            transit.shared, node = _forward(transit.shared, self._shared)
            if node is not None:
                transit.nodes[None] = node
        elif op is Op.W:
            weight_gradients(transit.pendings.pop(None))
        else:
            number = transit.numbers.shared
            gradient = transit.gradients[number]
            transit.gradients[number] = self._backward(transit, None, gradient, deferred=op is Op.I)

    def _backward(self, transit: Transit, unit: Unit | None, gradient: Tensor, deferred: bool) -> Tensor:
        """The gradient of a unit's input; its weights' gradients wait for W if `deferred`."""
        leaf, edge = transit.nodes.pop(unit)
        if deferred:
            with self._ledger.leaving(unit, (edge,)) as transit.pendings[unit]:
                run_backward((edge,), (gradient,))
        else:
            run_backward((edge,), (gradient,))
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    # What they take, without a micro-batch.

    @property
    def _bytes_per_row(self) -> int:
        return self._like.shape[1] * self._like.element_size()

    def _time_exchange(self, load: Load, lanes: Lanes) -> dict[float, float]:
        """Seconds of an all-to-all by the bytes that leave a rank."""
        seconds: dict[float, float] = {}
        for share in SHARES:
            chunks = min(round(1 / share), self._count)
            places = len(self._others) * len(range(*self._range(0, chunks)))
            rows = max(round(max(load.sent, LEAST) * share / places), 1)
            seconds[rows * places * self._bytes_per_row] = self._time_sending(rows, chunks, lanes)
        return seconds

    def _time_sending(self, rows: int, chunks: int, lanes: Lanes) -> float:
        """Seconds of the first of so many chunks, in the lane's thread."""
        work = Work(Action(0, Op.F, 0), Part.DISPATCH, 0, Op.F, 0, chunks)
        sizes = [[rows] * self._count] * self._group.size
        piece = self._like.new_zeros(rows, self._like.shape[1])
        going, coming = ([[piece] * self._count for _ in sizes] for _ in range(2))
        send = partial(self._send, work, going, sizes, coming, sizes)
        launches = [lanes.launch(Lane.ALL_TO_ALL, send) for _ in range(REPEAT + 1)]
        for launched in launches:
            launched.wait()
        return median(launched.end - launched.start for launched in launches[1:])

    def _time_experts(self, load: Load, besides: float) -> dict[Op, Line]:
        """By op, with what a chunk that other ranks wait for takes `besides`."""
        computed = max(load.computed, LEAST)
        seconds: dict[float, dict[Op, float]] = {}
        for share in SHARES:
            sizes = [max(round(share * computed / self._count), 1)] * self._count
            ones = self._like.new_ones(sum(sizes), self._like.shape[1])
            seconds[sum(sizes) / computed] = seconds_of(
                lambda leaf, sizes=sizes: self._experts(leaf, sizes, 0), ones, self._ledger
            )
        lines = {op: Line.fit({share: run[op] for share, run in seconds.items()}) for op in (Op.F, Op.I, Op.W)}
        return {op: line if op is Op.W else line._replace(fixed=line.fixed + besides) for op, line in lines.items()}

    def _time_shared(self, load: Load) -> dict[tuple[Part, Op], float]:
        assert self._shared is not None
        seconds = seconds_of(self._shared, self._like.new_ones(round(load.tokens), self._like.shape[1]), self._ledger)
        seconds[Op.B] = seconds[Op.I] + seconds[Op.W]
        return {(Part.SHARED, op): taken for op, taken in seconds.items()}

    # Chunks, ranges, units.

    def _units(self, work: Work) -> list[Unit]:
        """What is computed in one work: this rank's own rows, those of others, or, in W, both."""
        low, high = (0, self._count) if work.chunk == LOCAL else self._range(work.chunk, work.chunks)
        kinds = (True, False) if work.op is Op.W else (work.chunk == LOCAL,)
        return [Unit(own, *each) for each in self._ranges if low <= each[0] < high for own in kinds]

    def _range(self, chunk: int, chunks: int) -> tuple[int, int]:
        """The local experts of one chunk: from, up to."""
        return chunk * self._count // chunks, (chunk + 1) * self._count // chunks


def _forward(x: Tensor, layer: Any) -> tuple[Tensor, Node | None]:
    if not torch.is_grad_enabled():
        return layer(x), None
    leaf = x.detach().requires_grad_()
    made = layer(inner(leaf))
    return made.detach(), Node(leaf, edge_of(made))


def _routed(flat: Any) -> Any:
    """The `Routed` in what a segment has made, whether or not layers have put something aside besides."""
    value = unflatten(flat)
    return value if isinstance(value, Routed) else value.value


def _leaving(transit: Transit) -> Flat:
    """What goes on to the outlet: what came from the inlet, with what the experts have made in place of the tokens."""
    tensors, metas = list(transit.flat.tensors), list(transit.flat.spec.tensors)
    made = {transit.numbers.rows: transit.arrive()}
    if transit.shared is not None:
        made[transit.numbers.shared] = transit.shared
    for number, tensor in made.items():
        tensors[number], metas[number] = tensor, metas[number]._replace(needs_grad=torch.is_grad_enabled())
    transit.entering = tuple(number for number, meta in enumerate(metas) if meta.needs_grad)
    transit.shared = None
    transit.flat = transit.flat._replace(tensors=())  # of which the backward needs the spec alone
    return transit.flat._replace(tensors=tuple(tensors), spec=transit.flat.spec._replace(tensors=tuple(metas)))
