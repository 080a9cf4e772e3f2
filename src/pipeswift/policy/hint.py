"""What a schedule has to be for a policy to leave its order."""

from __future__ import annotations

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule


def check_hint(policy: str, hint: Schedule) -> None:
    """Raises PipeSwiftError unless `hint` flushes, has one route, and no Overlaps."""
    if not hint.flush:
        raise PipeSwiftError(
            f"policy {policy} needs a schedule that flushes: {hint.name} updates weights while micro-batches are in "
            "flight. Use policy follow, or a schedule that flushes (1f1b, zb-h1)."
        )
    if len(hint.routes) != 1:
        raise PipeSwiftError(
            f"policy {policy} needs a schedule with one route: {hint.name} has {len(hint.routes)}. Use policy follow, "
            "or a schedule with one route (1f1b, zb-h1)."
        )
    if hint.overlaps:
        raise PipeSwiftError(
            f"policy {policy} cannot part woven pairs: {hint.name} has Overlaps. Use policy follow, or a schedule "
            "without them (1f1b, zb-h1)."
        )
