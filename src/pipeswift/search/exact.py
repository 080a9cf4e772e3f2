"""The exact search: CP-SAT over start times, with no-overlap per rank and memory as a cumulative or a reservoir."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeswift.ir import Op, Order, Schedule
from pipeswift.search.problem import Problem
from pipeswift.simulate import replay

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

F, I, W = Op.F, Op.I, Op.W  # noqa: E741
DIGITS = 6  # of the longest time, kept where no fewer say all times exactly


class Answer(NamedTuple):
    """What the solver knows in the end: an order as good as any it met, and seconds that none can go below."""

    schedule: Schedule | None
    bound: float


class Passes(NamedTuple):
    """The solver's variables of one pass."""

    start: cp_model.IntVar
    end: cp_model.LinearExpr
    interval: cp_model.IntervalVar


def solve(problem: Problem, hint: Schedule, bound: float, *, seconds: float, workers: int = 1) -> Answer:
    """Look for an order better than `hint`, a split one, and for a higher bound, for so many seconds or until Ctrl-C.

    The objective is that of the problem without variability.
    """
    from ortools.sat.python import cp_model

    ticks, scale = in_ticks(problem)
    trace = replay(hint, ticks.costs)
    keys = zip(trace.op.tolist(), trace.stage.tolist(), trace.microbatch.tolist(), strict=True)
    hinted = dict(zip(keys, trace.start.astype(int).tolist(), strict=True))
    model = cp_model.CpModel()
    horizon = int(trace.end.max() + trace.start.max() + 1)
    passes = {key: _passes(model, horizon, int(ticks.seconds[key])) for key in hinted}
    for key, start in hinted.items():
        model.add_hint(passes[key].start, start)
    for least, later in _precedences(ticks, passes):
        model.add(later >= least)
    for rank in range(ticks.ranks):
        model.add_no_overlap([passes[key].interval for key in passes if ticks.rank_of[key[1]] == rank])
        _keep_memory(model, ticks, rank, passes)
    value = _objective(model, ticks, passes, horizon)
    model.add(value >= int(np.floor(bound * scale * (1 - 1e-9))))
    model.minimize(value)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    solver.parameters.num_workers = workers
    with interruptible(solver):
        status = solver.solve(model)
    found = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = _in_order(ticks, {key: solver.value(one.start) for key, one in passes.items()})
    return Answer(found, max(bound, solver.best_objective_bound / scale))


@contextmanager
def interruptible(solver: cp_model.CpSolver) -> Iterator[None]:
    """Ctrl-C ends the solver early, where it is heard, and is Python's again afterwards, which the solver forgets."""
    heard = threading.current_thread() is threading.main_thread()
    solver.parameters.catch_sigint_signal = heard
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if heard and handler is not None:
            signal.signal(signal.SIGINT, handler)


def in_ticks(problem: Problem) -> tuple[Problem, float]:
    """The problem with whole numbers for its times, and how many of their unit make a second.

    Exact where all times are decimals of at most DIGITS digits, else rounded down: a bound stays a bound.
    """
    costs = problem.costs
    transfer = costs.boundary_bytes / costs.bandwidth
    times = np.concatenate([np.ravel(part) for part in (problem.seconds[: Op.B], costs.latency, transfer)])
    scale = _scale(times)

    def whole(part: float | np.ndarray) -> np.ndarray:
        return np.floor(np.asarray(part) * scale + 1e-6)

    ticked = replace(
        costs,
        seconds=whole(problem.seconds),
        latency=whole(costs.latency),
        boundary_bytes=whole(transfer),
        bandwidth=1.0,
    )
    return replace(problem, costs=ticked, variability=0.0), scale


def _scale(values: np.ndarray) -> float:
    """The least power of ten, over what the results have in common, that makes all `values` whole, if DIGITS do."""
    largest = float(np.abs(values).max())
    if largest == 0:
        return 1.0
    first = -int(np.floor(np.log10(largest)))
    for digits in range(DIGITS + 1):
        scale = 10.0 ** (first + digits)
        whole = np.rint(values * scale)
        if np.abs(whole - values * scale).max() < 1e-6:
            return scale / float(np.gcd.reduce(whole.astype(np.int64)))
    return 10.0 ** (first + DIGITS)


def _passes(model: cp_model.CpModel, horizon: int, lasts: int) -> Passes:
    start = model.new_int_var(0, horizon, "")
    return Passes(start, start + lasts, model.new_fixed_size_interval_var(start, lasts, ""))


def _precedences(ticks: Problem, passes: dict) -> Iterator[tuple]:
    """(expression, start of a pass that is at least that): inputs, and micro-batches in order."""
    delay = ticks.delay.astype(int)
    for (op, stage, microbatch), (start, *_) in passes.items():
        if microbatch:
            yield passes[op, stage, microbatch - 1].end, start
        if op == F and stage:
            yield passes[F, stage - 1, microbatch].end + int(delay[F, stage - 1]), start
        if op == I and stage < ticks.stages - 1:
            yield passes[I, stage + 1, microbatch].end + int(delay[I, stage + 1]), start
        if op in (I, W):
            yield passes[op - 1, stage, microbatch].end, start


def _keep_memory(model: cp_model.CpModel, ticks: Problem, rank: int, passes: dict) -> None:
    """No more than the limit on a rank."""
    if not np.isfinite(ticks.limit):
        return
    stages = np.flatnonzero(ticks.rank_of == rank).tolist()
    memory = ticks.memory[:, stages]
    scale = _scale(np.append(memory.ravel(), ticks.limit))
    # Rounded so that nothing which fits is excluded; that what is found does fit, is checked afterwards.
    limit = int(np.ceil(ticks.limit * scale - 1e-6))
    every = [(stage, i) for stage in stages for i in range(ticks.microbatches)]
    if (memory[F] >= 0).all() and (memory[I:] <= 0).all():
        spans, sizes = [], []
        for op in (I, W):
            for stage, i in every:
                if size := int(-ticks.memory[op, stage] * scale + 1e-6):
                    first, last = passes[F, stage, i], passes[op, stage, i]
                    length = model.new_int_var(0, 10**12, "")
                    spans.append(model.new_interval_var(first.start, length, last.end, ""))
                    sizes.append(size)
        model.add_cumulative(spans, sizes, limit)
        if ticks.chunks == 1:
            _follow_from_memory(model, ticks, stages[0], passes)
        return
    times, changes = [], []
    for op in (F, I, W):
        for stage, i in every:
            change = int(np.floor(ticks.memory[op, stage] * scale + 1e-6))
            times.append(passes[op, stage, i].start if change > 0 else passes[op, stage, i].end)
            changes.append(change)
    model.add_reservoir_constraint(times, changes, -(10**12), limit)


def _follow_from_memory(model: cp_model.CpModel, ticks: Problem, stage: int, passes: dict) -> None:
    """What micro-batch order and memory imply for one stage: an F waits for the I, and for the W, of an earlier one."""
    forward, input_gradient, _ = ticks.memory[:, stage]
    room = ticks.slack_limit - forward
    for op, size in ((I, forward), (W, forward + input_gradient)):
        if size > 0:
            behind = int(room // size) + 1
            for i in range(behind, ticks.microbatches):
                model.add(passes[F, stage, i].start >= passes[op, stage, i - behind].end)


def _objective(model: cp_model.CpModel, ticks: Problem, passes: dict, horizon: int) -> cp_model.IntVar:
    """The longest span, or the makespan; every rank starts as soon as its first input is there."""
    value = model.new_int_var(0, horizon, "")
    model.add(passes[F, 0, 0].start == 0)
    last = ticks.microbatches - 1
    for rank in range(ticks.ranks):
        stages = np.flatnonzero(ticks.rank_of == rank).tolist()
        first = passes[F, stages[0], 0].start
        if stages[0]:
            model.add(first == passes[F, stages[0] - 1, 0].end + int(ticks.delay[F, stages[0] - 1]))
        for stage in stages:
            end = passes[W, stage, last].end
            model.add(value >= (end - first if ticks.objective == "span" else end))
    return value


def _in_order(ticks: Problem, starts: dict[tuple[int, int, int], int]) -> Schedule:
    orders: list[list[tuple]] = [[] for _ in range(ticks.ranks)]
    for (op, stage, microbatch), start in starts.items():
        orders[ticks.rank_of[stage]].append((start, op, microbatch, stage))
    rows = ([(stage, op, i) for _, op, i, stage in sorted(order)] for order in orders)
    return replace(ticks.empty, orders=tuple(Order(np.array(one, dtype=np.int32)) for one in rows))
