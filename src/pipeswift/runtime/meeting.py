"""Where ranks wait for each other before there are groups: names in the rendezvous store, and who is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic, sleep

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.process import Condition, Process

_POLL = 0.05  # seconds
_STOPPED = 10.0  # seconds that a process may be stopped while others wait for it


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
    """Says which process this rank is, for the others to look after while they wait for it."""
    store.set(_process_of(rank), json.dumps(Process.here()))


def meet(store: Store, place: str, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
    """Returns when all of `ranks` have called this with the same `place`; a new place every time.

    Raises MeshError, on every rank that is there, when another one's process has ended or stays stopped (known for
    processes of one host that have registered), or is not there after `timeout`.
    """
    keys = {other: f"{place}/{other}" for other in ranks}
    failed = f"{place}/failed"
    began, stopped_at = monotonic(), {}
    try:
        store.set(keys[rank], "here")
        while not store.check(list(keys.values())):
            if store.check([failed]):
                raise MeshError(store.get(failed).decode())
            missing = [other for other, key in keys.items() if not store.check([key])]
            now = monotonic()
            if reason := _given_up(store, missing, stopped_at, now) or _late(missing, place, now - began, timeout):
                store.set(failed, reason)
                sleep(20 * _POLL)  # the store ends with this process, when it is the one that holds it
                raise MeshError(reason)
            sleep(_POLL)
    except RuntimeError as error:
        raise MeshError(f"lost the rendezvous store while waiting for other ranks ({place}): {error}") from error


def _process_of(rank: int) -> str:
    return f"process of rank {rank}"


def _late(missing: Sequence[int], place: str, waited: float, timeout: timedelta) -> str:
    if waited < timeout.total_seconds() or not missing:
        return ""
    names = ", ".join(map(str, missing))
    did = "start" if place == "start" else f"reach {place}"
    return (
        f"rank {names} did not {did} within {timeout.total_seconds():g} s: look at what that process printed, or give "
        "it more time with timeout=SECONDS"
    )


def _given_up(store: Store, missing: Sequence[int], stopped_at: dict[int, float], now: float) -> str:
    for rank in missing:
        if not store.check([_process_of(rank)]):
            continue
        process = Process(*json.loads(store.get(_process_of(rank))))
        condition = process.condition()
        if condition is Condition.GONE:
            return f"rank {rank} is gone: its process {process} has ended"
        if condition is not Condition.STOPPED:
            stopped_at.pop(rank, None)
        elif now - stopped_at.setdefault(rank, now) > _STOPPED:
            process.kill()
            return f"rank {rank} is stopped: its process {process} did not go on for {_STOPPED:g} s, and was ended"
    return ""
