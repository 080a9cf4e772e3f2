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
    """Two timelines of one step: what the replay of the measured durations gives, and what was measured.

    The measured one may have spans of other lanes; the replay has passes alone.
    """

    schedule: Schedule
    predicted: Trace
    measured: Trace

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


def compare(schedule: Schedule, steps: Sequence[Trace], updates_every: int | None = None) -> Comparison:
    """The comparison of the step of median length among the measured `steps` (the upper one of two).

    updates_every: without flush, micro-batches per update, for which ranks of one stage wait for each other.
    """
    measured = sorted(steps, key=lambda step: makespan(whole_passes(step)))[len(steps) // 2]
    predicted = run(schedule, measured_costs(schedule, measured), updates_every=updates_every)
    return Comparison(schedule, replace(predicted, name="predicted"), replace(measured, name="measured"))
