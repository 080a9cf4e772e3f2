"""The watchdog: a thread per rank that ends a run which cannot go on, with a table of what every rank was doing."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from math import inf
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.heartbeat import Heartbeat
from pipeswift.runtime.meeting import connecting
from pipeswift.runtime.peers import Disagreement, Peers
from pipeswift.runtime.process import Condition, Process
from pipeswift.runtime.progress import Progress, last_done, now_doing
from pipeswift.runtime.states import Fault, Sighting, State, find_fault, table

_COLLECT = 0.3  # seconds between finding a fault and acting on it, so that everyone's last word is in
_LEAD = 3.0  # seconds that the lowest live rank has to speak, before others do
_LEAVE = 2.0  # seconds that a rank which failed has to end by itself


class Halted(PipeSwiftError):
    """The watchdog ended the run."""


class Watchdog:
    """Watches over `progress` and the other ranks. Every rank must make one, at the same time.

    patience: seconds without any progress, or without a sign of life of one rank, after which all ranks are ended.
    """

    def __init__(self, peers: Peers, progress: Progress, patience: float):
        self._rank, self._progress, self._patience = peers.everyone.rank, progress, patience
        self._replicas = peers.replicas.size
        self._interval = min(max(patience / 10, 0.1), 2.0)
        self._processes: list[Process] = peers.everyone.all_gather(Process.here())
        hosts = {(process.host, process.namespace) for process in self._processes}
        self._heartbeat = Heartbeat(peers.everyone, hosts_differ=len(hosts) > 1)
        now = monotonic()
        self._heard: dict[int, tuple[State | None, float]] = dict.fromkeys(range(peers.everyone.size), (None, now))
        self._position, self._moved = progress.position(), now
        self._fault_since = inf
        self._closing, self._warned = Event(), False
        progress.alert, progress.await_verdict = self._heartbeat.wake, self._await_verdict
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Tells the others that this rank leaves, and ends the thread."""
        self._stop(left=True)

    def _stop(self, left: bool) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._heartbeat.wake()
        self._thread.join()
        for _ in range(3):  # a datagram may be lost
            self._heartbeat.send(self._state(monotonic(), left))
        self._heartbeat.close()
        self._progress.alert = self._progress.await_verdict = _nothing
        atexit.unregister(self._at_exit)

    # The thread.

    def _watch(self) -> None:
        before = monotonic()
        while not self._closing.is_set():
            now = monotonic()
            if now - before > 2 * self._interval + 1.0:
                self._forgive(now)
            before = now
            self._heartbeat.send(self._state(now))
            pause = self._interval if self._fault_since == inf else 0.1
            for rank, message in self._heartbeat.receive(pause):
                self._hear(rank, message)
            if not self._closing.is_set():
                self._judge(monotonic())

    def _state(self, now: float, left: bool = False) -> State:
        progress = self._progress
        position = progress.position()
        if position != self._position:
            self._position, self._moved = position, now
        doing, waits = now_doing(progress)
        return State(
            call=progress.call,
            phase=progress.phase,
            joins=progress.joins,
            still=now - self._moved,
            last=last_done(progress),
            doing=doing,
            waits=waits,
            error=progress.error[:2000],
            lost=progress.lost,
            left=left,
        )

    def _hear(self, rank: int, message: str | list[Any]) -> None:
        if isinstance(message, str):
            self._end_on_word(message)
        else:
            with suppress(TypeError):  # of another version, which start-up is about to refuse
                self._heard[rank] = State(*message), monotonic()

    def _forgive(self, now: float) -> None:
        """This process itself has been stopped: nobody's silence meanwhile counts."""
        self._moved = now
        self._heard = {rank: (state, now) for rank, (state, _) in self._heard.items()}

    def _sightings(self, now: float) -> list[Sighting]:
        seen = []
        for rank, process in enumerate(self._processes):
            if rank == self._rank:
                seen.append(Sighting(str(process), Condition.ALIVE, self._state(now), 0.0))
            else:
                state, heard = self._heard[rank]
                seen.append(Sighting(str(process), process.condition(), state, now - heard))
        return seen

    def _judge(self, now: float) -> None:
        ranks = self._sightings(now)
        self._warn_of_silence(ranks)
        fault = find_fault(ranks, self._patience)
        if fault is None:
            self._fault_since = inf
            return
        self._fault_since = min(self._fault_since, now)
        waited = now - self._fault_since
        able = [rank for rank, seen in enumerate(ranks) if rank not in fault.culprits and not seen.left]
        leads = not able or self._rank == able[0]
        if waited >= (_COLLECT if leads else _LEAD):
            self._end(ranks, fault)

    def _warn_of_silence(self, ranks: list[Sighting]) -> None:
        mute = [rank for rank, seen in enumerate(ranks) if seen.state is None and seen.age > self._patience]
        if mute and not self._warned:
            self._warned = True
            _say(
                f"pipeswift watchdog: rank {self._rank} has heard nothing of rank {mute[0]} "
                f"({self._processes[mute[0]]}) yet; let UDP pass between the hosts, or this rank cannot be watched"
            )

    def _await_verdict(self) -> None:
        """The transport broke. A rank at fault is found soon, and then this process ends; else the caller goes on."""
        self._heartbeat.wake()
        self._closing.wait(self._patience + _LEAD + 2 * self._interval)

    # The end.

    def _end(self, ranks: list[Sighting], fault: Fault) -> None:
        _say(f"pipeswift watchdog: {fault.text}\n\n{table(ranks, fault, self._replicas)}\n")
        for _ in range(2):
            self._heartbeat.send(fault.text)
        self._exit(fault.text)

    def _end_on_word(self, text: str) -> None:
        if self._progress.error:
            sleep(_LEAVE)
        else:
            _say(f"pipeswift watchdog: rank {self._rank} ends with the others: {text}")
        self._exit(text)

    def _exit(self, text: str) -> None:
        now = monotonic()
        for rank, seen in enumerate(self._sightings(now)):
            if seen.condition is Condition.STOPPED or (seen.age >= self._patience and not seen.left):
                self._processes[rank].kill()
        if not self._progress.error:
            with suppress(Exception):
                get_error_handler().record_exception(Halted(text))  # for a launcher to show
        flusher = Thread(target=_flush, daemon=True)  # another thread may hold a stream's lock for good
        flusher.start()
        flusher.join(1.0)
        os._exit(1)

    def _at_exit(self) -> None:
        """The program ends without having closed the pipeline."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self._progress.error:
            self._progress.fail(error)
        self._stop(left=not self._progress.error)
        if error is not None:
            # Channels' threads still wait in the transport, and such a thread aborts the interpreter's orderly end.
            atexit._run_exitfuncs()
            _flush()
            os._exit(1)


def watch(peers: Peers, progress: Progress, patience: float | None) -> Watchdog | None:
    """A watchdog for a pipeline of several ranks; None where it is switched off. Every rank must call this.

    Raises, on every rank, PipeSwiftError when `patience` is no number of seconds, and Disagreement when ranks differ.
    """
    with connecting("starting the watchdog"):
        everyone = peers.everyone.all_gather(patience)
    for rank, theirs in enumerate(everyone):
        if theirs is not None and not (isinstance(theirs, (int, float)) and theirs > 0):
            raise PipeSwiftError(f"watchdog = {theirs!r} is no number of seconds above 0: use 60, or None for none")
        if theirs != everyone[0]:
            raise Disagreement(
                f"ranks disagree on the watchdog: rank 0 has {everyone[0]}, rank {rank} has {theirs}; "
                "give every rank the same number of seconds"
            )
    if patience is None or peers.everyone.size == 1:
        return None
    with connecting("starting the watchdog"):
        return Watchdog(peers, progress, patience)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _nothing() -> None:
    pass
