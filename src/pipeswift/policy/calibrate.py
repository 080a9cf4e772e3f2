"""Calibration: what a static run says about a pipeline's times, for monitors that have seen nothing yet."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from pipeswift.ir import Op
from pipeswift.policy.monitor import Calibration
from pipeswift.trace import Trace, whole_passes


def calibrate(trace: Trace) -> Calibration:
    """The mean seconds of each (stage, op) in `trace`, and the std/mean of each stage's passes.

    A pass lasts from its first start to its last end, with the all-to-alls that it waits for. A stage's swing is the
    largest among its F and backwards.
    """
    spans = whole_passes(trace)
    took = spans.end - spans.start
    seconds: dict[tuple[int, Op], float] = {}
    swing: dict[int, float] = {}
    for stage in np.unique(spans.stage).tolist():
        for op in Op:
            mine = took[(spans.stage == stage) & (spans.op == op)]
            if len(mine):
                seconds[stage, op] = mean = float(mine.mean())
                if op is not Op.W and mean > 0.0:
                    swing[stage] = max(swing.get(stage, 0.0), float(mine.std()) / mean)
    return Calibration(seconds, swing)


def merge_calibrations(members: Sequence[Calibration]) -> Calibration:
    """One for pipelines that run a schedule together: their mean seconds, and of each stage the largest swing."""
    first = members[0]
    return Calibration(
        {key: fmean(member.seconds[key] for member in members) for key in first.seconds},
        {stage: max(member.swing[stage] for member in members) for stage in first.swing},
    )
