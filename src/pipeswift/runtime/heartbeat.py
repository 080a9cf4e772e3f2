"""Datagrams between ranks. Nobody waits for anybody: a rank that is stopped cannot block another."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

from pipeswift.runtime.groups import Group
from pipeswift.runtime.process import Process

Address = tuple[str, int]


class Heartbeat:
    """This rank's socket and the others' addresses. Every rank must make one, at the same time.

    hosts_differ: whether some rank is on another host; without that, nothing leaves the loopback interface.
    """

    def __init__(self, group: Group, *, hosts_differ: bool):
        self._rank = group.rank
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("0.0.0.0" if hosts_differ else "127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        host = reachable_name() if hosts_differ else "127.0.0.1"
        everyone: list[tuple[Address, str]] = group.all_gather(((host, self.port), secrets.token_hex(8)))
        self._run = everyone[0][1]  # tells this run's datagrams from strays
        self._addresses = {rank: address for rank, (address, _) in enumerate(everyone) if rank != group.rank}

    def send(self, message: Any) -> None:
        """To every other rank; what cannot be delivered is lost."""
        data = json.dumps([self._run, self._rank, message]).encode()
        for address in self._addresses.values():
            with suppress(OSError):
                self._socket.sendto(data, address)

    def wake(self) -> None:
        """Ends this rank's own `receive`, from another thread."""
        with suppress(OSError):
            self._socket.sendto(b"", ("127.0.0.1", self.port))

    def receive(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """(rank, message) of what arrives in that time, or until `wake`."""
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data, address = self._socket.recvfrom(65536)
            except TimeoutError:
                return
            except OSError:
                continue  # an earlier datagram came back: its receiver is no more
            if not data:
                return
            with suppress(ValueError, TypeError):
                run, rank, message = json.loads(data)
                if run == self._run and rank in self._addresses:
                    self._addresses[rank] = address  # the way it came is a way back, whatever its host is called
                    yield rank, message

    def close(self) -> None:
        self._socket.close()


def home(group: Group) -> tuple[str, str]:
    """(address to listen at, host to be found under), for sockets between the group's processes alone: where one host
    has them all, nothing leaves its loopback interface. Every rank must call this."""
    processes: list[Process] = group.all_gather(Process.here())
    if len({(process.host, process.namespace) for process in processes}) == 1:
        return "127.0.0.1", "127.0.0.1"
    return "0.0.0.0", reachable_name()


def reachable_name() -> str:
    """This host's name, or its address on the way out where the name means the loopback interface."""
    name = socket.gethostname()
    with suppress(OSError):
        found = socket.gethostbyname(name)
        if not found.startswith("127."):
            return found
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address kept for documentation; nothing is sent
        return probe.getsockname()[0]
    return name
