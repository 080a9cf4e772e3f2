"""The order of evaluation: forwards alone, over the placement of a training schedule."""

from __future__ import annotations

from collections.abc import Iterator

from pipeswift.ir import Action, F, Order, Schedule


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """Forwards of any number of micro-batches: p at a time, each group through a rank's stages in ascending order.

    rank 0  0F0 0F1 2F0 2F1 0F2 2F2
    rank 1      1F0 1F1 3F0 3F1 1F2 3F2
    """
    routes = tuple(i % len(schedule.routes) for i in range(microbatches))

    def order(rank: int) -> Iterator[Action]:
        for first in range(0, microbatches, schedule.num_ranks):
            group = range(first, min(first + schedule.num_ranks, microbatches))
            for stage in range(schedule.num_stages):
                yield from (F(stage, i) for i in group if schedule.routes[routes[i]][stage] == rank)

    orders = tuple(Order.of(order(rank)) for rank in range(schedule.num_ranks))
    return Schedule(orders, schedule.routes, routes, name=f"{schedule.name}, forward only")
