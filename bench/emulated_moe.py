"""Emulated MoE stages: routers and all-to-alls are real, attention and experts only take their time.

And what such stages should take, simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeswift.cost import Costs
from pipeswift.ir import Action, Op, Schedule
from pipeswift.moe import MoE
from pipeswift.policy import Policy, Slots
from pipeswift.program import LOCAL, Form, Grain, Lane, Line, Part, Program, Work, compile_action
from pipeswift.rehearse.kernels import Emulated, sleep_until
from pipeswift.runtime.backward import halves
from pipeswift.runtime.rules import Gradients, Rule
from pipeswift.simulate import run_joint
from pipeswift.trace import Trace


class Size(NamedTuple):
    """Of a stage, which is one block. tokens: of a micro-batch, which is one sample.

    attention: seconds of its F, I and W each. row: seconds of an expert's F, I and W each, for one token.
    """

    width: int = 64
    experts: int = 16
    top_k: int = 4
    tokens: int = 128
    attention: float = 4e-3
    row: float = 1.6e-5

    @property
    def row_bytes(self) -> int:
        return 4 * self.width

    @property
    def message_bytes(self) -> int:
        """Of a micro-batch between two stages."""
        return self.tokens * self.row_bytes


class Even(nn.Module):
    """In the place of a router's norm: token t asks for experts t, t + 1, ... alike, so that all loads are equal."""

    def __init__(self, size: Size):
        super().__init__()
        asked = torch.arange(size.tokens).unsqueeze(-1) + torch.arange(size.top_k)
        self.register_buffer("asked", nn.functional.one_hot(asked % size.experts, size.width).sum(1).float())

    def forward(self, x: Tensor) -> Tensor:
        return x + 100.0 * self.asked  # pyright: ignore[reportOperatorIssue]


class SleepingExperts(nn.Module):
    """y = x * w of a row's expert; F, I and W last `row` seconds for each row without using a core."""

    expert_parallel = True

    def __init__(self, width: int, hidden: int, held: Sequence[int], *, seed: int, scale: float, row: float):
        super().__init__()
        self.held, self._row = tuple(held), row
        for expert in held:
            self.register_parameter(f"weight{expert}", nn.Parameter(torch.ones(width)))

    def forward(self, rows: Tensor, sizes: Sequence[int], first: int = 0) -> Tensor:
        weights = [getattr(self, f"weight{expert}") for expert in self.held[first : first + len(sizes)]]
        return halves(self._rule(tuple(sizes)), rows, *weights)

    def _rule(self, sizes: tuple[int, ...]) -> Rule:
        def product(x: Tensor, *weights: Tensor) -> Tensor:
            until = perf_counter() + len(x) * self._row
            made = torch.cat([rows * weight for rows, weight in zip(x.split(sizes), weights, strict=True)])
            sleep_until(until)
            return made

        def to_weights(gradient: Tensor, x: Tensor, *weights: Tensor | None) -> Gradients:
            until = perf_counter() + len(x) * self._row
            made = tuple(rows.sum(0) for rows in (gradient * x).split(sizes))
            sleep_until(until)
            return made

        return Rule(product, lambda gradient, x, *weights: product(gradient, *weights), to_weights)


def block(size: Size, even: bool = False, **settings: Any) -> nn.Module:
    """One stage. settings: of its MoE. even: equal loads, whatever the router."""
    moe = MoE(
        size.width,
        experts=size.experts,
        hidden=1,
        top_k=size.top_k,
        balance=0.0,
        norm=Even(size) if even else None,
        kind=partial(SleepingExperts, row=size.row),
        **settings,
    )
    if even:
        nn.init.eye_(moe.inlet.router.weight)
    return nn.Sequential(Emulated(size.width, F=size.attention, I=size.attention, W=size.attention), moe)


# The same, simulated.


class Network(NamedTuple):
    """By bytes: an all-to-all of an expert group by those that leave a rank, and a message between stages."""

    exchange: Line
    message: Line


@dataclass(frozen=True)
class Model:
    """What there is to know of a pipeline of such stages, but for the loads of its experts.

    grains: by stage. own: seconds that the runtime adds to a pass of each op.
    """

    size: Size
    network: Network
    members: int
    grains: Mapping[int, Grain]
    own: Mapping[Op, float] = field(default_factory=dict)

    def run(
        self, schedule: Schedule, rows: np.ndarray, policy: Policy | None = None, slots: Slots | None = None
    ) -> list[Trace]:
        """One step, of each member. rows: that experts get, (stages, members, experts, micro-batches)."""
        loads = Loads(self, rows)
        return run_joint(
            schedule,
            [self._costs(schedule, loads.weight_seconds(member)) for member in range(self.members)],
            {(stage, op): self.program(stage, op) for stage in self.grains for op in (Op.F, Op.I, Op.B)},
            loads,
            policy,
            slots,
            latency=self.network.message.fixed,
        )

    def program(self, stage: int, op: Op) -> Program:
        return self.grains[stage].cut(whole(stage, op), op)

    def _costs(self, schedule: Schedule, weight_seconds: np.ndarray) -> Costs:
        stages = schedule.num_stages
        seconds = np.full((len(Op), *weight_seconds.shape), np.nan)
        seconds[Op.W] = weight_seconds
        return replace(
            Costs.uniform(stages, boundary_bytes=self.size.message_bytes),
            seconds=seconds,
            latency=self.network.message.fixed,
            bandwidth=1 / self.network.message.each,
        )


def whole(stage: int, op: Op) -> Program:
    return compile_action(Action(stage, op, 0), layout=(Form.MOE,), takes=False, sends=False)


class Loads:
    """What the works of one step take, as `run_joint` asks for it: (member, work) -> seconds."""

    def __init__(self, model: Model, rows: np.ndarray):
        stages, members, experts, microbatches = rows.shape
        self._model, self._held = model, experts // members
        self._others = 1 - np.eye(members, dtype=int)
        self._rows = rows.reshape(stages, members, members, self._held, microbatches)  # from, to, local expert

    def __call__(self, member: int, work: Work) -> float:
        size, exchange, own = self._model.size, self._model.network.exchange, self._model.own
        if work.part is Part.COUNTS:
            return exchange(8.0 * size.experts)
        if work.lane is Lane.ALL_TO_ALL:
            return exchange(self._sent(work) * size.row_bytes)
        if work.part is Part.EXPERTS:
            return self._computed(member, work) * size.row
        if work.part is Part.MERGE:
            return 0.0
        return size.attention * (2 if work.op is Op.B else 1) + own.get(work.action.op, 0.0)

    def weight_seconds(self, member: int) -> np.ndarray:
        """Of W, (stages, micro-batches)."""
        size = self._model.size
        return self._rows[:, :, member].sum((1, 2)) * size.row + size.attention + self._model.own.get(Op.W, 0.0)

    def _computed(self, member: int, work: Work) -> int:
        """Rows that a work of its experts computes there."""
        rows = self._chunk(work)[:, member]
        own = rows[member].sum()
        if work.op is Op.W:
            return int(rows.sum())
        return int(own if work.chunk == LOCAL else rows.sum() - own)

    def _sent(self, work: Work) -> int:
        """Rows that leave the member that most leave."""
        rows = self._chunk(work).sum(-1) * self._others
        there = (work.part is Part.DISPATCH) == (work.op is Op.F)
        return int(rows.sum(axis=1 if there else 0).max())

    def _chunk(self, work: Work) -> np.ndarray:
        """(from, to, local expert), the experts being those of one chunk."""
        rows = self._rows[work.action.stage, ..., work.action.microbatch]
        if work.chunk == LOCAL:
            return rows
        return rows[..., work.chunk * self._held // work.chunks : (work.chunk + 1) * self._held // work.chunks]
