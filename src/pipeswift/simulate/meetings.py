"""Where ranks that hold one stage wait for each other, in a schedule that updates weights as it goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipeswift.ir import Action, Op, Schedule
from pipeswift.versions import last_shares


class Meetings:
    """One for each update of each stage that is on several ranks. every: micro-batches per update; None: no meeting."""

    def __init__(self, schedule: Schedule, every: int | None):
        holders = [set(ranks) for ranks in zip(*schedule.routes, strict=True)]
        self._every = every or 1
        self._sizes = [len(ranks) for ranks in holders]
        self._last = {
            (rank, stage, microbatch)
            for stage, ranks in enumerate(holders)
            if every is not None and len(ranks) > 1
            for rank in ranks
            for microbatch in last_shares(schedule, rank, stage, every)
        }
        self._here: dict[tuple[int, int], list[int]] = defaultdict(list)  # ranks, by (stage, update)

    def after(self, rank: int, action: Action) -> Sequence[int]:
        """The ranks that may go on now that `action` has ended on `rank`; it goes nowhere before it is among them."""
        stage, op, microbatch = action
        if op not in (Op.W, Op.B) or (rank, stage, microbatch) not in self._last:
            return (rank,)
        here = self._here[stage, microbatch // self._every]
        here.append(rank)
        return here if len(here) == self._sizes[stage] else ()
