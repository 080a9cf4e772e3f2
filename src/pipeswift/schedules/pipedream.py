"""PipeDream: 1F1B that never flushes; weights change while micro-batches are in flight."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, lcm

from pipeswift.ir import Action, B, F, Order, Schedule
from pipeswift.schedules.registry import Idle, Peak, ScheduleError, schedule


@schedule(
    "pipedream",
    paper="Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training, sec. 3.2",
    bubble=Idle("(p-1)(F+B), once per order", lambda p, m, v, t: (p - 1) * (t.F + t.B)),
    memory=Peak("min(m, p-r)", lambda p, m, v, r: min(m, p - r)),
    flush=False,
)
def pipedream(p: int, m: int, replicas: Sequence[int] | None = None) -> Schedule:
    """Start up with NOAM-r forwards, then alternate without end; the optimizer steps on each rank as it goes.

    rank 0  F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4 ..
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .. ..

    m: micro-batches of the whole order; only its end drains. NOAM, the number in flight, is p.
    replicas: ranks per stage, p in all; by default 1 each. Micro-batches take a stage's ranks in turn (1F1B-RR), and
    each starts up with the number of ranks from its stage on over the number of its own stage's, rounded up.
    """
    copies = [1] * p if replicas is None else list(replicas)
    if sum(copies) != p or min(copies) < 1:
        raise ScheduleError(f"replicas = {copies} do not add up to {p} ranks: use {[1] * p}, say")
    first = [sum(copies[:stage]) for stage in range(len(copies))]
    routes = tuple(
        tuple(start + k % count for start, count in zip(first, copies, strict=True)) for k in range(lcm(*copies))
    )

    def order(stage: int, replica: int) -> Iterator[Action]:
        mine = range(replica, m, copies[stage])
        warm = min(len(mine), ceil(sum(copies[stage:]) / copies[stage]))
        yield from (F(stage, i) for i in mine[:warm])
        for after, i in enumerate(mine, warm):
            yield B(stage, i)
            yield from (F(stage, i) for i in mine[after : after + 1])

    orders = tuple(Order.of(order(stage, k)) for stage, count in enumerate(copies) for k in range(count))
    made = Schedule(orders, routes, tuple(i % len(routes) for i in range(m)), name="pipedream", flush=False)
    return made if replicas is None else replace(made, options={"replicas": copies})
