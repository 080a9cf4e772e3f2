"""The executors of one pipeline: one for each number of micro-batches that it trains on or evaluates."""

from __future__ import annotations

from collections.abc import Callable

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.runtime.assembly import Assembly, Request, resolve
from pipeswift.runtime.executor import Executor
from pipeswift.schedules.forward_only import forward_only


class Executors:
    """make: the executor of a schedule. It is asked when the first run needs one."""

    def __init__(self, request: Request, assembly: Assembly, ranks: int, make: Callable[[Schedule], Executor]):
        self._request, self._schedule, self._ranks = request, assembly.schedule, ranks
        self._make: Callable[[Schedule], Executor] | None = make  # None once closed: it may hold what holds this
        self._made: dict[tuple[bool, int], Executor] = {}  # by (training, micro-batches)

    def of(self, training: bool, microbatches: int | None) -> Executor:
        """The one that trains on, or evaluates, so many micro-batches; None: as many as the pipeline's schedule has."""
        if self._make is None:
            raise PipeSwiftError("the pipeline is closed: make a new one, or call close() after the last step")
        count = self._schedule.num_microbatches if microbatches is None else microbatches
        if not isinstance(count, int) or count < 1:
            raise PipeSwiftError(f"microbatches = {count!r} is no whole number from 1: use 1, say")
        if (training, count) not in self._made:
            self._made[training, count] = self._make(self._schedule_for(training, count))
        return self._made[training, count]

    def drop(self) -> None:
        """Lets go of all; they are made again, when something that they were made from has changed."""
        for executor in self._made.values():
            executor.close()
        self._made.clear()

    def close(self) -> None:
        self.drop()
        self._make = None

    def _schedule_for(self, training: bool, count: int) -> Schedule:
        if not training:
            return forward_only(self._schedule, count)
        if count == self._schedule.num_microbatches:
            return self._schedule
        schedule = resolve(self._request.schedule, self._ranks, count, self._request.chunks)
        self._request.accepts(schedule)
        return schedule
