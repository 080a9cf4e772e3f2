"""One measured step beside its prediction: the replay of its schedule with the durations measured in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeswift.cost import activations
from pipeswift.ir import Schedule
from pipeswift.simulate import measured_costs, run
from pipeswift.trace import Trace, makespan, whole_passes


@dataclass(frozen=True)
class Comparison:
    """Timelines of one step: what was measured on each replica, and the replay of the durations on the first.

    The measured ones may have spans of other lanes; the replay has passes alone.
    """

    schedule: Schedule
    predicted: Trace
    replicas: tuple[Trace, ...]

    @property
    def measured(self) -> Trace:
        """Of the first replica."""
        return self.replicas[0]

    @property
    def memory(self) -> np.ndarray:
        """Increments that count live activations, as in `Costs.memory`."""
        return activations(self.schedule.num_stages, self.schedule.chunks)

    @property
    def error(self) -> float:
        """How much longer the step took than predicted, as a share of the prediction."""
        return makespan(self.passes) / makespan(self.predicted) - 1

    @property
    def passes(self) -> Trace:
        """What of the measured timeline the replay predicts: whole passes, with what they wait for inside."""
        return whole_passes(self.measured)


def compare(schedule: Schedule, steps: Sequence[Sequence[Trace]], updates_every: int | None = None) -> Comparison:
    """The comparison of the step of median length among the measured `steps` (the upper one of two).

    steps: for each, the traces of all replicas; its length is that of the first.
    updates_every: without flush, micro-batches per update, for which ranks of one stage wait for each other.
    """
    chosen = sorted(steps, key=lambda step: makespan(whole_passes(step[0])))[len(steps) // 2]
    predicted = run(schedule, measured_costs(schedule, chosen[0]), updates_every=updates_every)
    names = ["measured"] if len(chosen) == 1 else [f"replica {number}" for number in range(len(chosen))]
    replicas = tuple(replace(trace, name=name) for trace, name in zip(chosen, names, strict=True))
    return Comparison(schedule, replace(predicted, name="predicted"), replicas)
