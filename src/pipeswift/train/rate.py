"""The learning rate over a run: up in a line, down in a half cosine; lower at first where gradients are stale."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: int, final: float) -> float:
    """The rate of step 0, 1, ..., steps - 1: `peak` is reached after `warmup` steps, final * peak at the end."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(steps - 1 - warmup, 1)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def corrected(rate: float, staleness: float, done: float, *, over: float) -> float:
    """The rate for a gradient that is `staleness` updates old, after `done` of `over` steps of correction.

    A delay of tau updates shrinks the range of stable rates by about 1 + tau, so the rate is divided by that at first,
    and by ever less, until after `over` steps it is what it would be without delay: by (1 + tau)^(1 - done / over).
    Source: Yang et al. 2021, PipeMare: Asynchronous Pipeline Parallel DNN Training, technique 1; they divide by powers
    of tau, and 1 + tau leaves a gradient without delay its rate.
    """
    return rate / (1 + staleness) ** max(0.0, 1 - done / over) if over else rate
