"""A schedule again, in the order that is best for other costs: same places, same memory, same form of backward."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import numpy as np

from pipeswift.cost import Costs, activations
from pipeswift.ir import Op, Order, Schedule
from pipeswift.passes import split_backward
from pipeswift.search.bound import lower_bound
from pipeswift.search.find import search
from pipeswift.search.packed import peaks
from pipeswift.search.problem import Problem
from pipeswift.simulate import replay
from pipeswift.trace import makespan

TRIES = 200  # each takes time in proportion to the passes, as a step does
WORTH = 0.01  # the share of a step that an order must win over the schedule's own


def replanned(
    schedule: Schedule, costs: Costs, in_flight: int | None = None, current: Schedule | None = None
) -> Schedule:
    """The order with the least makespan that a short search finds, if it wins 1 % over what there is.

    schedule: with one route, as many stages on each rank, no Overlaps, and backwards all whole or all split.
    costs: their seconds and links. Seconds of B do not matter where backwards are split, nor those of I and W where
        they are whole; they may be NaN.
    in_flight: micro-batches that a rank may hold, for each of its chunks; by default each as many as in `schedule`.
    current: what an earlier call came to. The better of it and `schedule` is what there is.
    The same answer every time and everywhere. Raises SearchError for other seconds that are missing.
    """
    held = _held(schedule) if in_flight is None else np.full(schedule.num_ranks, float(in_flight * schedule.chunks))
    costs_of_search = replace(costs, seconds=_seconds(schedule, costs), memory=_memory(schedule, held))
    size = schedule.num_ranks, schedule.num_microbatches, schedule.chunks
    places = schedule.routes[0]
    problem = Problem(costs_of_search, *size, lambda stage, ranks: places[stage], 1.0, "makespan")
    lasts, kept = min(
        ((makespan(replay(one, costs)), one) for one in (current or schedule, schedule)), key=itemgetter(0)
    )
    enough = (1.0 - WORTH) * lasts
    if enough <= lower_bound(problem):
        return kept
    order = _found(problem, schedule)
    return order if makespan(replay(order, costs)) < enough else kept


def load() -> None:
    """Loads what `replanned` runs, so that the first does not take longer; on a machine's first use it is compiled."""
    uneven = Costs.uniform(3, comm=0.3)
    uneven = replace(uneven, seconds=uneven.seconds * np.array([1.0, 1.3, 0.7])[:, None])
    search(uneven, ranks=3, microbatches=4, memory_limit=2.0, objective="makespan", work_limit=TRIES)


def _found(problem: Problem, schedule: Schedule) -> Schedule:
    found = search(
        problem.costs,
        ranks=problem.ranks,
        microbatches=problem.microbatches,
        chunks=problem.chunks,
        placement=problem.placement,
        memory_limit=problem.limit,
        objective=problem.objective,
        work_limit=TRIES,
    )
    orders = split_backward(found.schedule).orders
    return replace(schedule, orders=orders if schedule.splits_backward else tuple(map(_whole, orders)))


def _held(schedule: Schedule) -> np.ndarray:
    """The most micro-batches on each rank, one on each of two chunks being two."""
    return peaks(schedule, activations(schedule.num_stages))


def _seconds(schedule: Schedule, costs: Costs) -> np.ndarray:
    """For a search, which splits all backwards: a whole one is an I, before a W that takes no time."""
    seconds = costs.seconds.copy()
    if schedule.splits_backward:
        seconds[Op.B] = seconds[Op.I] + seconds[Op.W]
    else:
        seconds[Op.I], seconds[Op.W] = seconds[Op.B], 0.0
    return seconds


def _memory(schedule: Schedule, held: np.ndarray) -> np.ndarray:
    """What passes add, as shares of what their rank may hold."""
    shares = 1.0 / held[list(schedule.routes[0])]
    memory = activations(schedule.num_stages) * shares
    if not schedule.splits_backward:
        memory[Op.I], memory[Op.W] = memory[Op.B], 0.0
    return memory


def _whole(order: Order) -> Order:
    """Without W, every I a B."""
    rows = order.rows[order.rows[:, 1] != Op.W].copy()
    rows[rows[:, 1] == Op.I, 1] = Op.B
    return Order(rows)
