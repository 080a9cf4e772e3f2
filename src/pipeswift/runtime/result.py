"""What a step or an evaluation gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeswift.runtime.auxiliary import Figures
from pipeswift.runtime.recorder import Recorder
from pipeswift.trace import Trace


@dataclass(frozen=True)
class Result:
    """What a step or an evaluation gave; the same on every rank except for `outputs`, `figures` and `trace`.

    loss: the mean over all samples, or sum over count; None where it was not asked for, or without a loss function.
    losses: what the loss function gave, by micro-batch, those of replica 0 first. outputs: of the model, by micro-batch
        of this rank's pipeline, where asked for.
    figures: what this rank's layers have reported, by layer. trace: its spans, made when it is first asked for.
    """

    loss: float | None
    losses: tuple[float, ...]
    outputs: tuple[Any, ...] | None
    figures: Mapping[str, Figures]
    _recorder: Recorder
    _name: str

    @cached_property
    def trace(self) -> Trace:
        return self._recorder.trace(self._name)
