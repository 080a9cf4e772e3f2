"""The learning rate over a run: up in a line, down in a half cosine."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: int, final: float) -> float:
    """The rate of step 0, 1, ..., steps - 1: `peak` is reached after `warmup` steps, final * peak at the end."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(steps - 1 - warmup, 1)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
