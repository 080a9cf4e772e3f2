"""Lanes: a thread for each, which runs what the host has launched on it, and the runner of programs over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from statistics import median
from threading import Event, Thread
from typing import Any

from pipeswift.program import Kind, Lane, Program, Span, Timeline, Work
from pipeswift.runtime.recorder import clock

Call = Callable[[], Any]
_HANDSHAKES = 15


class Launched:
    """A call under way on a lane, or queued for it; start and end, by `recorder.clock`, once it is done."""

    def __init__(self, call: Call):
        self._call = call
        self._done = Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self.start = self.end = 0.0

    def wait(self) -> Any:
        """What the call returned. Raises what it raised, or what ended the lane before its turn came."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def run(self, broken: BaseException | None) -> BaseException | None:
        """On the lane's thread. `broken`: what ended the lane, if anything did; returns the same for the next call."""
        self.start = clock()
        try:
            if broken is not None:
                raise broken
            self._value = self._call()
        except BaseException as error:
            self._error = error
        self.end = clock()
        del self._call  # and with it the tensors that it holds
        self._done.set()
        return self._error


class Lanes:
    """One rank's threads, each started with its lane's first launch.

    Calls of one lane run one after the other, in the order of their launches. After one has failed the others of its
    lane fail with it, since the ranks no longer agree on what comes next in a collective.
    """

    def __init__(self) -> None:
        self._queues: dict[Lane, SimpleQueue[Launched | None]] = {}
        self._threads: list[Thread] = []
        self.waits_for: Work | None = None  # what the host waits for now, for whoever watches over it

    def launch(self, lane: Lane, call: Call) -> Launched:
        """Queues `call` and returns at once."""
        if lane not in self._queues:
            self._queues[lane] = SimpleQueue()
            name = f"lane {lane.name.lower().replace('_', '-')}"
            self._threads.append(Thread(target=_serve, args=(self._queues[lane],), name=name, daemon=True))
            self._threads[-1].start()
        launched = Launched(call)
        self._queues[lane].put(launched)
        return launched

    def run(self, program: Program, calls: Mapping[Work, Call]) -> Timeline:
        """Takes the program's steps in order, `calls[work]` being what a work does, and says when each work ran.

        Raises whatever a call raised; a launch's error shows where its work is waited for.
        """
        spans: list[Span] = []
        launched: dict[Work, Launched] = {}
        for kind, work in program.steps:
            if kind is Kind.LAUNCH:
                launched[work] = self.launch(work.lane, calls[work])
            elif kind is Kind.WAIT:
                self.wait(work, launched[work])
                spans.append(Span(work, launched[work].start, launched[work].end))
            else:
                start = clock()
                calls[work]()
                spans.append(Span(work, start, clock()))
        return Timeline(tuple(spans))

    def wait(self, work: Work, launched: Launched) -> None:
        """Until `launched`, which does `work`, is done; meanwhile `waits_for` says so."""
        self.waits_for = work
        try:
            launched.wait()
        finally:
            self.waits_for = None

    def close(self) -> None:
        """Ends the threads, after what has been launched."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()


def handshake(lanes: Lanes) -> float:
    """Seconds that a launch costs besides its work, the host waiting for it: both threads have to wake. A median."""
    seconds = []
    for _ in range(_HANDSHAKES):
        start = clock()
        lanes.launch(Lane.ALL_TO_ALL, _nothing).wait()
        seconds.append(clock() - start)
    return median(seconds)


def _nothing() -> None:
    pass


def _serve(queue: SimpleQueue[Launched | None]) -> None:
    broken = None
    while (launched := queue.get()) is not None:
        broken = launched.run(broken)
        del launched  # or its result would live until the next launch
