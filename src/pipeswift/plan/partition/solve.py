"""Solving a problem: by dynamic programming, or, where the stages of a rank add up, by the exact solver."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeswift.ir import Schedule
from pipeswift.plan.partition import chunked, descent, dynamic
from pipeswift.plan.partition.held import in_flight
from pipeswift.plan.partition.partition import ROUNDING, Partition, excess, price
from pipeswift.plan.partition.pricing import Pricing
from pipeswift.plan.partition.problem import Infeasible, Layers, Machine, Objective, PartitionError, Problem, Transfers

WORK = 3.0


def partition(problem: Problem, *, work: float = WORK) -> Partition:
    """The cut with the least bottleneck that no rank's memory forbids, and among those an even one.

    Exact, except where ranks hold several stages and their times or memory add up: then a solver does so much `work`
    (about seconds, but the same on any machine, so that all ranks agree) and the gap says how far from the best the
    result can be. Raises Infeasible, naming a rank and the least memory that would do.
    """
    pricing = Pricing(problem)
    bounded = bool(np.isfinite(problem.machine.memory).any())
    if problem.chunks == 1 or (problem.objective == "stage" and not bounded):
        stages = dynamic.fastest(pricing)
        if not stages:
            raise _too_little(problem, dynamic.leanest(pricing))
        return price(problem, stages)
    return _adding_up(pricing, work)


def layout(
    layers: Layers,
    schedule: Schedule,
    machine: Machine | None = None,
    *,
    together: frozenset[int] = frozenset(),
    transfers: Transfers = "beside",
    objective: Objective = "rank",
    work: float = WORK,
) -> tuple[int, ...]:
    """Layers per stage of a schedule, as `Pipeline` takes them: the partition for its places and what it has in flight.

    machine: equal ranks with any amount of memory if not given. Ranks that hold the same stages, as the two ends of
    DualPipe do, share their micro-batches and count as one. Raises PartitionError when ranks share only some stages.
    """
    machine = Machine.of(schedule.num_ranks) if machine is None else machine
    rank_of, teams = _teams(schedule)
    problem = Problem(
        layers,
        replace(
            machine,
            speeds=np.array([machine.speeds[team].sum() for team in teams]),
            memory=np.array([machine.memory[team].min() for team in teams]),
            hosts=machine.hosts[[team[0] for team in teams]],
        ),
        rank_of=rank_of,
        in_flight=in_flight(schedule),
        together=together,
        transfers=transfers,
        objective=objective,
    )
    return partition(problem, work=work).layout


def _teams(schedule: Schedule) -> tuple[tuple[int, ...], list[list[int]]]:
    """Which team holds each stage, and the ranks of each team: those that hold the same stages on some route."""
    holders = [tuple(sorted(set(ranks))) for ranks in zip(*schedule.routes, strict=True)]
    teams = sorted(set(holders))
    if sum(map(len, teams)) != schedule.num_ranks:
        raise PartitionError(
            f"schedule {schedule.name} has ranks that share some of their stages, not all. Give a layout of your own."
        )
    return tuple(teams.index(team) for team in holders), [list(team) for team in teams]


def _adding_up(pricing: Pricing, work: float) -> Partition:
    """First the cut that is best stage by stage: it is even, and often the best for ranks, too. Then better ones."""
    problem = pricing.problem
    stages = dynamic.fastest(pricing)
    if not stages:
        raise _no_cut(problem)
    even = price(problem, stages)
    known = even if (excess(problem, even) <= 1 + ROUNDING).all() else None
    bound = pricing.work[-1] / problem.machine.speeds.sum() if problem.objective == "rank" else even.bottleneck
    if known and known.bottleneck > bound * (1 + ROUNDING):
        known = _better(known, price(problem, descent.speed_up(pricing, known.stages)))
    if known is None or known.bottleneck > bound * (1 + ROUNDING):
        answer = chunked.solve(pricing, problem.objective, hint=known.stages if known else (), work=work)
        if answer.stages:
            known = _better(known, price(problem, answer.stages))
        if known is None:
            raise _unsolved(pricing, answer.finished, work)
        bound = max(bound, answer.bound)
    if problem.objective == "rank":
        known = price(problem, descent.level(pricing, known.stages))
    gap = 1 - bound / known.bottleneck if known.bottleneck else 0.0
    return replace(known, gap=gap if gap > ROUNDING else 0.0)


def _better(known: Partition | None, other: Partition) -> Partition:
    """The faster one; the first if they are equal."""
    return other if known is None or other.bottleneck < known.bottleneck * (1 - ROUNDING) else known


def _unsolved(pricing: Pricing, impossible: bool, work: float) -> PartitionError:
    if impossible:
        return _too_little(pricing.problem, chunked.solve(pricing, "memory", work=work).stages)
    return PartitionError(f"no cut within memory was found with work = {work:g}. Use {10 * work:g}, or more memory.")


def _too_little(problem: Problem, leanest: list) -> Infeasible:
    """What to say when memory forbids every cut: the one that asks for the least says what would do."""
    if not leanest:
        return _no_cut(problem)
    found = price(problem, leanest)
    over = excess(problem, found)
    rank = int(np.argmax(over))
    has, needs = problem.machine.memory[rank], found.rank_bytes[rank]
    alike = bool((problem.machine.memory == has).all())
    remedy = f"Use {needs:.6g} or more" if alike else f"Use at least {over[rank]:.6g} times as much on every rank"
    return Infeasible(
        f"memory {has:g} is too little: even with the cut that asks for the least, {list(found.layout)}, rank {rank} "
        f"needs {needs:.6g}. {remedy}, or more ranks."
    )


def _no_cut(problem: Problem) -> Infeasible:
    return Infeasible(
        f"no cut of {len(problem.layers)} layers into {problem.stages} stages keeps both together and apart. "
        "Take some layers out of them."
    )
