"""In which order micro-batches of known, unequal cost enter the pipeline."""

from __future__ import annotations

from collections.abc import Sequence


def source_order(costs: Sequence[float]) -> tuple[int, ...]:
    """The micro-batches as they should enter, by number: cheap ones first and last, costly ones in between.

    costs: of each micro-batch, in any unit. Cheap micro-batches fill and drain the pipeline fast, and neighbours of
    nearly equal cost keep the ranks from waiting for each other. Equal costs keep their order as far as it goes.
    """
    by_cost = sorted(range(len(costs)), key=costs.__getitem__)
    return (*by_cost[::2], *reversed(by_cost[1::2]))
