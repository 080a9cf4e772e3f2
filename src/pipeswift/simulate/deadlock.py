"""The error of a timeline that cannot go on: who is stuck, at what, and what it misses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action, Overlap, Product, Schedule

SHOWN = 4  # stuck ranks that the text names


class Stuck(NamedTuple):
    """One rank's next entry and why it does not start."""

    rank: int
    entry: Action | Overlap
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} cannot start {self.entry}: {', '.join(self.reasons)}"


class Deadlock(PipeSwiftError):
    """The schedule or policy leaves ranks waiting for each other for ever."""

    def __init__(self, name: str, num_ranks: int, stuck: Sequence[Stuck]):
        self.stuck = tuple(stuck)
        ranks = len({one.rank for one in stuck})
        lines = [f"schedule {name} cannot finish: {ranks} of {num_ranks} ranks are stuck."]
        lines += [f"  {one}" for one in self.stuck[:SHOWN]]
        if len(self.stuck) > SHOWN:
            lines.append(f"  and {len(self.stuck) - SHOWN} more")
        super().__init__("\n".join(lines))


def misses(schedule: Schedule, product: Product, stage: int, microbatch: int) -> str:
    """The reason "needs the output of stage 2, micro-batch 5, from rank 2"."""
    what = product.name.lower().replace("_", " ")
    source = schedule.rank_of(stage, microbatch)
    return f"needs the {what} of stage {stage}, micro-batch {microbatch}, from rank {source}"
