"""Orders as one array, for the compiled loops; what they are worth; and whether they keep the limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeswift.ir import Order, Schedule
from pipeswift.passes import split_backward
from pipeswift.search.problem import Problem
from pipeswift.simulate import Deadlock, replay
from pipeswift.trace import longest_span, makespan


def pack(schedule: Schedule) -> np.ndarray:
    """int32, shape (ranks, actions of a rank, 3), columns stage, op, microbatch; every B is split into I and W."""
    return np.stack([order.rows for order in split_backward(schedule).orders])


def unpack(problem: Problem, orders: np.ndarray) -> Schedule:
    """The schedule of `orders`, which it copies."""
    return replace(problem.empty, orders=tuple(Order(rows.copy()) for rows in orders))


def value(problem: Problem, schedule: Schedule) -> float:
    """The objective in seconds, a mean over the draws; infinite for orders that do not finish."""
    measure = longest_span if problem.objective == "span" else makespan
    try:
        return float(np.mean([measure(replay(schedule, costs)) for costs in problem.draws]))
    except Deadlock:
        return np.inf


def peaks(schedule: Schedule, memory: np.ndarray) -> np.ndarray:
    """The most that each rank holds, read off the orders, in the unit of `memory` (as in Costs), shape (ranks,)."""
    found = []
    for order in schedule.orders:
        stage, op, _ = order.rows.T
        change = memory[op, stage]
        found.append((np.cumsum(change) - np.minimum(change, 0.0)).max(initial=0.0))
    return np.array(found)


def keeps_limit(problem: Problem, schedule: Schedule) -> bool:
    return bool((peaks(schedule, problem.costs.memory) <= problem.slack_limit).all())
