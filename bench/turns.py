"""Pipelines of emulated MoE stages that take turns, step by step, so that what disturbs one disturbs all.

Each of pp * EP ranks is on a host of its own, as far as it can see, with a slow link to others (see shaped_link.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import pipeswift as ps
from emulated_moe import Loads, Model, Network, Size, block
from harness import launch
from pipeswift.ir import Action, Op, Order, Schedule
from pipeswift.moe import Skew
from pipeswift.moe.router import capacity
from pipeswift.program import Grain, Line, together
from pipeswift.trace import COLUMNS, Trace, makespan, whole_passes
from shaped_link import ShapedLink, exchange

EP, MBIT = 2, 75
WARM_UP = 4  # steps that do not count: chunks are found after the first, policies calibrate with the second
FITTED = 2  # the last of them, in which is seen what the runtime adds to a pass


class System(NamedTuple):
    """One of the pipelines. policy, in_flight: as in `Pipeline`. capacity: factor of its layers; None: dropless."""

    name: str
    schedule: Schedule
    policy: str = "follow"
    in_flight: int | None = None
    chunks: tuple[int, int] | Literal["auto"] = "auto"
    capacity: float | None = None


class Turn(NamedTuple):
    """A step on one rank. asked, dropped: rows of its stage."""

    trace: Trace
    asked: int
    dropped: int


class Seen(NamedTuple):
    """What one rank has seen. grains, turns: by system."""

    network: Network
    grains: list[Mapping[int, Grain]]
    turns: list[list[Turn]]


class Ran:
    """What all ranks have seen of one system."""

    def __init__(self, system: System, size: Size, number: int, seen: Sequence[Seen]):
        self.system, self._size = system, size
        steps = [Step(turns, system, size) for turns in zip(*(each.turns[number] for each in seen), strict=True)]
        self.steps = steps[WARM_UP:]
        model = Model(size, seen[0].network, EP, seen[0].grains[number])
        self.model = replace(model, own=_own(model, steps[WARM_UP - FITTED : WARM_UP]))

    @property
    def chunks(self) -> str:
        """In a forward and a backward, by stage where they differ."""
        return " ".join(dict.fromkeys(f"{grain.forward},{grain.backward}" for grain in self.model.grains.values()))


class Step:
    """One step of a system, on all ranks."""

    def __init__(self, turns: Sequence[Turn], system: System, size: Size):
        self._turns, self._system, self._size = turns, system, size
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(turn.trace, name) for turn in turns]) for name in COLUMNS
        }
        columns["rank"] = np.repeat(np.arange(len(turns), dtype=np.int32), [len(turn.trace) for turn in turns])
        #: Of all ranks, by their number among all.
        self.trace = Trace(len(turns), **columns)
        self.asked, self.dropped = sum(turn.asked for turn in turns), sum(turn.dropped for turn in turns)

    @property
    def seconds(self) -> float:
        """From the first pass's start to the last one's end, on any rank."""
        return makespan(whole_passes(self.trace))

    @property
    def rows(self) -> np.ndarray:
        """What experts got, (stages, members, experts, micro-batches)."""
        asked = []
        for turn in self._turns:
            values = {each.name: each.value for each in turn.trace.counters if ": rows " in each.name}
            asked.append([values[name] for name in sorted(values, key=lambda name: int(name.split()[-1]))])
        factor, size = self._system.capacity, self._size
        room = np.inf if factor is None else capacity(factor, size.tokens, size.top_k, size.experts)
        return np.minimum(np.array(asked).reshape(-1, EP, *np.shape(asked[0])), room).astype(int)

    @property
    def order(self) -> Schedule:
        """What the first replica's ranks did, as a schedule."""
        orders = []
        for passes in self.passes[:, 0]:
            spans = passes.only(np.argsort(passes.start))
            rows = zip(spans.stage.tolist(), map(Op, spans.op.tolist()), spans.microbatch.tolist(), strict=True)
            orders.append(Order.of(Action(*row) for row in rows))
        return replace(self._system.schedule, orders=tuple(orders), name=f"{self._system.name}'s")

    @property
    def passes(self) -> np.ndarray:
        """(ranks of a pipeline, members), each a trace of whole passes."""
        found = np.empty(len(self._turns), dtype=object)
        for rank, turn in enumerate(self._turns):
            found[rank] = whole_passes(turn.trace)
        return found.reshape(-1, EP)

    def joint_seconds(self) -> np.ndarray:
        """Of each pass, from when the last member came to it until the last one left, (4, stages, micro-batches)."""
        schedule = self._system.schedule
        start, end = np.full((2, len(Op), schedule.num_stages, schedule.num_microbatches), -np.inf)
        for passes in self.passes.ravel():
            where = passes.op, passes.stage, passes.microbatch
            np.maximum.at(start, where, passes.start)
            np.maximum.at(end, where, passes.end)
        return np.where(np.isfinite(start), end - np.where(np.isfinite(start), start, 0.0), np.nan)


def _own(model: Model, steps: Sequence[Step]) -> dict[Op, float]:
    """How much longer passes took than their emulated parts and their all-to-alls should, medians by op."""
    found: dict[Op, list[float]] = {}
    for step in steps:
        loads = Loads(model, step.rows)
        for (op, stage, microbatch), seconds in np.ndenumerate(step.joint_seconds()):
            if not np.isnan(seconds):
                action = Action(stage, Op(op), microbatch)
                found.setdefault(Op(op), []).append(seconds - _expected(model, loads, action))
    return {op: median(extra) for op, extra in found.items()}


def _expected(model: Model, loads: Loads, action: Action) -> float:
    if action.op is Op.W:
        return max(loads.weight_seconds(member)[action.stage, action.microbatch] for member in range(EP))

    def of(member: int) -> Any:
        return lambda work: loads(member, work._replace(action=action))

    program = model.program(action.stage, action.op)
    return max(line.elapsed for line in together(program, [of(member) for member in range(EP)], [0.0] * EP))


# What runs.


def take_turns(systems: Sequence[System], steps: int, size: Size, skew: Skew | None) -> list[Ran]:
    """`steps` steps of each. skew: None for equal loads."""
    pp = systems[0].schedule.num_ranks
    with ShapedLink(pp * EP, MBIT) as link:
        seen = launch(_serve, systems, steps + WARM_UP, size, skew, world=link.ranks, network=link)
    return [Ran(system, size, number, seen) for number, system in enumerate(systems)]


def _serve(rank: int, world: int, systems: Sequence[System], steps: int, size: Size, skew: Skew | None) -> Seen:
    mesh = ps.init_mesh(pp=world // EP, ep=EP)
    network = Network(_exchange_line(mesh, size), _message_line(rank, size))
    pipes = [_pipeline(system, size, skew, mesh) for system in systems]
    turns: list[list[Turn]] = [[] for _ in systems]
    for step in range(steps):
        torch.manual_seed(step * world + rank)
        x = torch.randn(systems[0].schedule.num_microbatches, size.tokens, size.width)
        for number in range(len(pipes)):
            number = (number + step) % len(pipes)
            dist.barrier()
            turns[number].append(_turn(pipes[number], x))
    grains = [pipe.grains for pipe in pipes]
    for pipe in pipes:
        pipe.close()
    return Seen(network, grains, turns)


def _pipeline(system: System, size: Size, skew: Skew | None, mesh: Any) -> ps.Pipeline:
    layer = partial(block, size, skew=skew, even=skew is None, capacity_factor=system.capacity)
    return ps.Pipeline(
        [layer] * system.schedule.num_stages,
        loss=_loss,
        schedule=system.schedule,
        policy=system.policy,
        in_flight=system.in_flight,
        expert_chunks=system.chunks,
        mesh=mesh,
    )


def _turn(pipe: ps.Pipeline, x: Tensor) -> Turn:
    result = pipe.step(x, x, losses="last")
    sums = [figures.sums for figures in result.figures.values()]
    asked, dropped = (sum(int(each[name].sum()) for each in sums) for name in ("rows", "dropped"))
    return Turn(result.trace, asked, dropped)


def _loss(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def _exchange_line(mesh: Any, size: Size) -> Line:
    most = size.tokens * size.top_k * size.row_bytes
    return Line.fit(exchange([64, most // 8, most // 4, most // 2, most], 9, mesh["ep"].get_group(), apart=4e-3))


def _message_line(rank: int, size: Size) -> Line:
    """Between the first two stages, on every rank."""
    found: list[Any] = [None]
    if rank in (0, EP):
        found = [{amount: _one_way(rank, amount) for amount in (64, size.message_bytes // 2, size.message_bytes)}]
    dist.broadcast_object_list(found, src=0)
    return Line.fit(found[0])


def _one_way(rank: int, amount: int) -> float:
    tensor, times = torch.zeros(amount // 4), []
    for _ in range(9):
        start = perf_counter()
        for sender in (0, EP):
            if rank == sender:
                dist.send(tensor, EP - rank)
            else:
                dist.recv(tensor, EP - rank)
        times.append((perf_counter() - start) / 2)
    return median(times)
