"""Where ranks wait for each other before there are groups: names in the rendezvous store, and who is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from time import monotonic, sleep
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.process import Condition, Process

T = TypeVar("T")

_POLL = 0.05  # seconds
_CONNECT = 60.0  # seconds that ranks which have met may take to connect
_STOPPED = 5.0  # seconds that a process may be stopped while others wait for it

_known: dict[int, Process] = {}  # by rank: the processes of the world that this process is part of


class MeshError(PipeSwiftError):
    """The processes that were started do not form the mesh that was asked for."""


def rendezvous(rank: int, size: int, timeout: timedelta) -> Store:
    """The store that torchrun's environment describes, with every rank present.

    Raises MeshError, on every rank that is there, with the names of those that are not after `timeout`.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as missing:
        raise MeshError(f"{missing.args[0]} is not set: start the processes with torchrun, or set it") from None
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then the launcher holds the store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = TCPStore(
            host, port, None, rank == 0 and not launched, timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        who = "the launcher" if launched else "rank 0"
        raise MeshError(
            f"{who} did not start within {timeout.total_seconds():g} s: nothing answers at {host}:{port} (MASTER_ADDR, "
            f"MASTER_PORT); {str(error).splitlines()[0]}"
        ) from error
    store = PrefixStore(f"pipeswift/{attempt}", store)
    register(store, rank)
    meet(store, "start", rank, range(size), timeout)
    return store


def register(store: Store, rank: int) -> None:
    """Says which process this rank is, for the others to look after while they wait for it. Once per world."""
    _known.clear()
    store.set(_process_of(rank), json.dumps(Process.here()))


def meet(store: Store, place: str, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
    """Returns when all of `ranks` have called this with the same `place`; a new place every time.

    Raises MeshError, on every rank that is there, when another one's process has ended or stays stopped (known for
    processes of one host that have registered), or is not there after `timeout`.
    """
    keys = {other: f"{place}/{other}" for other in ranks}
    failed, began = f"{place}/failed", monotonic()
    stopped_at: dict[int, float] = {}
    _ask(lambda: store.set(keys[rank], "here"))
    while missing := _ask(lambda: _missing(store, keys)):
        if _ask(lambda: store.check([failed])):
            raise MeshError(_ask(lambda: store.get(failed)).decode())
        _remember(store, missing)
        now = monotonic()
        if reason := _given_up(missing, stopped_at, now) or _late(missing, place, now - began, timeout):
            _ask(lambda: store.set(failed, reason))
            sleep(20 * _POLL)  # the store ends with this process, when it is the one that holds it
            raise MeshError(reason)
        sleep(_POLL)
    _remember(store, ranks)


def occurrence(store: Store, what: str) -> int:
    """How often this has been called for `what`, this time included; a new store starts anew."""
    return _ask(lambda: store.add(what, 1))


@contextmanager
def connecting(what: str) -> Iterator[None]:
    """Around calls of the transport in which every rank waits for every other, and which nothing interrupts.

    Ends this process when another rank, after they have met, is gone or stopped, or when it takes too long.
    """
    done = Event()
    guard = Thread(target=_guard, args=(what, done), name="connecting", daemon=True)
    guard.start()
    try:
        yield
    except RuntimeError:
        guard.join(1.0)  # it may know why
        raise
    finally:
        done.set()
        guard.join()


def _guard(what: str, done: Event) -> None:
    began, stopped_at = monotonic(), {}
    while not done.wait(_POLL):
        now = monotonic()
        reason = _given_up(list(_known), stopped_at, now)
        if not reason and now - began > _CONNECT:
            reason = f"the ranks did not connect within {_CONNECT:g} s"
        if reason:
            with suppress(OSError):
                os.write(2, f"pipeswift: {reason}, while {what}\n".encode())
            os._exit(1)


def _process_of(rank: int) -> str:
    return f"process of rank {rank}"


def _missing(store: Store, keys: dict[int, str]) -> list[int]:
    return [] if store.check(list(keys.values())) else [rank for rank, key in keys.items() if not store.check([key])]


def _remember(store: Store, ranks: Sequence[int]) -> None:
    for rank in ranks:
        if rank not in _known and _ask(lambda rank=rank: store.check([_process_of(rank)])):
            _known[rank] = Process(*json.loads(_ask(lambda rank=rank: store.get(_process_of(rank)))))


def _ask(question: Callable[[], T]) -> T:
    """What the store answers. A thread asks, since a store whose process is stopped would hold the caller for good."""
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            errors.append(error)

    thread = Thread(target=ask, name="rendezvous", daemon=True)
    thread.start()
    thread.join(_STOPPED)
    if thread.is_alive():
        reason = f"the rendezvous store has not answered for {_STOPPED:g} s: {_holder()}"
        thread.join(1.0)
        raise MeshError(reason)
    if errors:
        raise MeshError(f"the rendezvous store is gone: {_holder()}; {errors[0]}") from errors[0]
    return answers[0]


def _holder() -> str:
    """What is known of the process that holds the store; when it is stopped, it is ended."""
    process = _known.get(0)
    condition = process.condition() if process else Condition.UNKNOWN
    if process and condition is Condition.STOPPED:
        process.kill()
        return f"rank 0 is stopped, its process {process} was ended"
    if condition is Condition.GONE:
        return f"rank 0 is gone, its process {process} has ended"
    return "look at rank 0, or at the launcher, whichever holds it"


def _late(missing: Sequence[int], place: str, waited: float, timeout: timedelta) -> str:
    if waited < timeout.total_seconds():
        return ""
    did = "start" if place == "start" else f"reach {place}"
    return (
        f"rank {', '.join(map(str, missing))} did not {did} within {timeout.total_seconds():g} s: look at what that "
        "process printed, or give it more time with timeout=..."
    )


def _given_up(missing: Sequence[int], stopped_at: dict[int, float], now: float) -> str:
    for rank in missing:
        if (process := _known.get(rank)) is None:
            continue
        condition = process.condition()
        if condition is Condition.GONE:
            return f"rank {rank} is gone: its process {process} has ended"
        if condition is not Condition.STOPPED:
            stopped_at.pop(rank, None)
        elif now - stopped_at.setdefault(rank, now) > _STOPPED:
            process.kill()
            return f"rank {rank} is stopped: its process {process} did not go on for {_STOPPED:g} s, and was ended"
    return ""
