"""What a measured step says of the links: as much latency as a replay of its passes lacks time."""

from __future__ import annotations

from dataclasses import replace

from pipeswift.cost import Costs
from pipeswift.ir import Schedule
from pipeswift.simulate.replay import replay
from pipeswift.trace import longest_span

HALVINGS = 12  # so to a 4096th of the step


def fitted_latency(schedule: Schedule, costs: Costs, span: float) -> float:
    """The latency, one for all links, with which the longest span of `replay(schedule, costs)` is `span` seconds.

    0 where it is as long without. No clock of one rank is compared with that of another.
    """

    def lasts(latency: float) -> float:
        return longest_span(replay(schedule, replace(costs, latency=latency)))

    low, high = 0.0, span
    if schedule.num_ranks == 1 or lasts(low) >= span:
        return 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if lasts(middle) < span else (low, middle)
    return (low + high) / 2
