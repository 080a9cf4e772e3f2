"""Which process a rank is, and whether it is still there, as far as another process on its host can tell."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class Condition(Enum):
    ALIVE = "alive"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"  # on another host, or the system does not tell


class Process(NamedTuple):
    """host: its name. namespace: in which `pid` holds. started: tells it from a later process with its pid."""

    host: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this host."""
        return cls(socket.gethostname(), _namespace(), pid, _stat(pid)[1])

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"

    def shares_host(self) -> bool:
        return (self.host, self.namespace) == (socket.gethostname(), _namespace())

    def condition(self) -> Condition:
        if not self.shares_host() or not self.started:
            return Condition.UNKNOWN
        letter, started = _stat(self.pid)
        if started != self.started or letter in "ZX":
            return Condition.GONE
        return Condition.STOPPED if letter == "T" else Condition.ALIVE

    def kill(self) -> None:
        """Ends it, if it is another process of this host and still the same one."""
        if self.pid != os.getpid() and self.condition() in (Condition.ALIVE, Condition.STOPPED):
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """(state letter, start time) from the system's table of processes; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
