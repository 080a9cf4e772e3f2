"""A pool of worker processes that have imported torch once and run many small distributed cases.

A case is a module-level function called as `function(rank, world, *args)` in `world` processes, with a fresh gloo
process group around it. Workers are forked from a server that has torch loaded, so a new one is ready at once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE = 5.0  # seconds that the other ranks may go on after one has failed

PR_SET_PDEATHSIG = 1


class CaseFailed(AssertionError):
    """A rank raised, died or hung; `errors` holds for each failed rank what it has to say."""

    def __init__(self, case: str, errors: dict[int, str]):
        self.errors = errors
        report = "".join(f"\n--- rank {rank} ---\n{errors[rank].rstrip()}\n" for rank in sorted(errors))
        super().__init__(f"{case}: {len(errors)} of its ranks failed{report}")


class Pool:
    """Worker processes, started when first needed; a failed case retires them all, so each case starts clean."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed"])
        self._folder = tempfile.TemporaryDirectory(prefix="procs-")
        self._cases = 0

    def run(self, function: Callable[..., Any], *args: Any, world: int, timeout: float = 120.0) -> list[Any]:
        """What `function(rank, world, *args)` returns on each rank.

        Raises CaseFailed when a rank raises, dies, or has not answered after `timeout` seconds; then the failed
        ranks' tracebacks, or the stacks of those that hang, are in its text.
        """
        self._cases += 1
        store = Path(self._folder.name) / f"store-{self._cases}"
        while len(self._workers) < world:
            log = Path(self._folder.name) / f"log-{self._cases}-{len(self._workers)}"
            self._workers.append(_Worker(self._context, log))
        ranks = dict(enumerate(self._workers[:world]))
        try:
            for rank, worker in ranks.items():
                worker.send((function, rank, world, args, str(store), timeout))
            results, errors = _gather(ranks, timeout)
        except BaseException:
            self.close()  # an answer still to come would be taken for one of the next case
            raise
        store.unlink(missing_ok=True)
        if errors:
            self.close()
            raise CaseFailed(f"{function.__name__} on {world} ranks", errors)
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """Ends every worker, whatever it is doing."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()


def _gather(ranks: dict[int, _Worker], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    """(results, errors) by rank, once every rank has answered, died, or been given up on."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    pending = {worker.connection: rank for rank, worker in ranks.items()}
    deadline = time.monotonic() + timeout
    while pending:
        answered = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not answered:
            errors |= {rank: ranks[rank].abort() for rank in pending.values()}
            break
        for connection in answered:
            rank = pending.pop(connection)  # type: ignore[arg-type]
            failed, answer = ranks[rank].receive()
            if not failed:
                results[rank] = answer
                continue
            errors[rank] = answer
            deadline = min(deadline, time.monotonic() + GRACE)
    return results, errors


class _Worker:
    """One process and the parent's end of its pipe; what it prints goes to `log`, emptied before each case."""

    def __init__(self, context: Any, log: Path):
        self._log = log
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, case: tuple) -> None:
        # Plain pickle copies tensors; a connection's own pickling would share their memory between processes.
        self.connection.send_bytes(pickle.dumps(case))

    def receive(self) -> tuple[bool, Any]:
        """(whether the rank failed, its result or its error's text)"""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self._process.join()
            return True, f"died with exit code {self._process.exitcode}\n{self._printed()}"

    def abort(self) -> str:
        """Ends a process that hangs; returns the stacks of its threads, which it prints when it gets the signal."""
        os.kill(self._process.pid, signal.SIGABRT)
        self._process.join(GRACE)
        return f"did not answer in time\n{self._printed()}"

    def stop(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.join()

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")


def _serve(connection: Connection, log: str) -> None:
    """A worker's life: cases until the parent closes the pipe."""
    _die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=output, all_threads=True)
    import torch

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        os.ftruncate(output, 0)
        connection.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    """Runs one case; the pickled (whether it failed, result or traceback)."""
    try:
        return pickle.dumps((False, _run_case(*pickle.loads(message))))
    except BaseException:
        return pickle.dumps((True, traceback.format_exc()))


def _run_case(function: Callable, rank: int, world: int, args: tuple, store: str, timeout: float) -> Any:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    torch.manual_seed(0)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    dist.barrier()
    try:
        return function(rank, world, *args)
    except BaseException:
        dist.destroy_process_group()  # so that ranks that wait for this one see it go
        raise
    # Otherwise the group stays until the next case: ranks that are slower may still need it.


def _die_with_parent() -> None:
    """Asks Linux to end this process with the fork server, which ends with the test run; elsewhere the pipe tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
