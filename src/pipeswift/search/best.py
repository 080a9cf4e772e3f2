"""The best schedule that a search has met, the bound on all, and how much further it may go."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from pipeswift.ir import Schedule
from pipeswift.search.packed import keeps_limit, value
from pipeswift.search.problem import Problem
from pipeswift.verify import verify

CLOSED = 1e-9  # relative gap below which a value is proved optimal


class Progress(NamedTuple):
    """What a watcher is told: seconds gone, seconds of the best order and of the bound, and what found the former."""

    seconds: float
    value: float
    lower_bound: float
    method: str


class Effort(NamedTuple):
    """How far a search goes: seconds, or tries (orders decoded or replayed); the other is infinite."""

    seconds: float
    tries: float


class Best:
    """Takes schedules in that are better than all before, keep the limit, and have nothing wrong with them."""

    def __init__(self, problem: Problem, bound: float, effort: Effort, watch: Callable[[Progress], None] | None = None):
        self.problem = problem
        self.bound = bound
        self.value = float("inf")
        self.schedule: Schedule | None = None
        self.method = "none"
        self.stopped: Callable[[], bool] = lambda: False
        self._began = monotonic()
        self._effort = effort
        self._tries = 0
        self._watch = watch

    @property
    def elapsed(self) -> float:
        return monotonic() - self._began

    @property
    def proved(self) -> bool:
        return self.value <= self.bound * (1 + CLOSED)

    def affords(self, tries: int) -> bool:
        """Whether the whole effort is worth so many tries."""
        return self._effort.tries >= tries

    def spend(self, tries: int) -> int:
        """Take so many tries, or as many as are left; how many these are."""
        taken = int(min(tries, self._effort.tries - self._tries))
        self._tries += taken
        return taken

    def left(self, share: float = 1.0) -> float:
        """Seconds until that share of the effort is spent; 0 also when told to stop, or when the best is proved."""
        if self.proved or self.stopped() or self._tries >= share * self._effort.tries:
            return 0.0
        return max(0.0, share * self._effort.seconds - self.elapsed)

    def offer(self, schedule: Schedule, method: str) -> None:
        """Take the schedule, found by `method`, if it is better than the best."""
        found = value(self.problem, schedule)
        if found < self.value and keeps_limit(self.problem, schedule) and not verify(schedule):
            self.value, self.schedule, self.method = found, schedule, method
            self._tell()

    def raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, min(bound, self.value))
        self._tell()

    def _tell(self) -> None:
        if self._watch:
            self._watch(Progress(self.elapsed, self.value, self.bound, self.method))
