"""What is wrong with a schedule: violations, and the error that prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action

Kind = Literal["shape", "placement", "completeness", "order", "memory", "deadlock", "versions", "collectives"]


class Violation(NamedTuple):
    """One thing that is wrong: where, with which action, of what kind, and the whole of it in a sentence.

    action is None where the fault is not in one action, or is one that no schedule can name.
    """

    rank: int
    action: Action | None
    kind: Kind
    sentence: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"


class InvalidSchedule(PipeSwiftError):
    """A schedule that must not run; `violations` says why."""

    def __init__(self, name: str, violations: Sequence[Violation], shown: int = 20):
        self.violations = tuple(violations)
        lines = [f"  {violation}" for violation in violations[:shown]]
        if len(violations) > shown:
            lines.append(f"  and {len(violations) - shown} more")
        super().__init__("\n".join([f"the schedule {name} cannot run:", *lines]))
