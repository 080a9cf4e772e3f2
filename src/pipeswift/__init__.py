"""PipeSwift: pipeline-parallel training for PyTorch. Plan it, run it, see it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Optimizer", "Pipeline", "Result", "Schedule", "init_mesh"]

if TYPE_CHECKING:
    from pipeswift.ir import Schedule
    from pipeswift.runtime import Optimizer, Pipeline, Result, init_mesh

_HOMES = dict.fromkeys(__all__, "pipeswift.runtime") | {"Schedule": "pipeswift.ir"}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that planning and simulating never wait for torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
