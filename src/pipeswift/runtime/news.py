"""What ranks tell their neighbours while a step runs: datagrams that nobody waits for, read between two passes."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from pipeswift.ir import Action, Op
from pipeswift.policy import Summary
from pipeswift.runtime.groups import Group
from pipeswift.runtime.heartbeat import Address, home

_FORM = struct.Struct("<8s5i4d")  # the run's token; rank, stage, op, micro-batch, depth; time, until, swing, step


class News:
    """One rank's socket and its neighbours' addresses. Every rank of the pipeline must make one, at the same time."""

    def __init__(self, group: Group, neighbours: Iterable[int]):
        local, host = home(group)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind((local, 0))
        everyone: Sequence[tuple[Address, bytes]] = group.all_gather(
            ((host, self._socket.getsockname()[1]), secrets.token_bytes(8))
        )
        self._token = everyone[0][1]  # tells this run's datagrams from strays
        self._neighbours = [everyone[rank][0] for rank in neighbours]
        self.sent = 0
        self.step = 0  # what is told in one step means nothing in the next

    def tell(self, summary: Summary) -> None:
        """To every neighbour; what cannot be delivered is lost."""
        rank, (stage, op, microbatch), time, until, swing, depth = summary
        data = _FORM.pack(self._token, rank, stage, op, microbatch, depth, time, until, swing, self.step)
        for address in self._neighbours:
            with suppress(OSError):
                self._socket.sendto(data, address)
                self.sent += 1

    def heard(self) -> Iterator[Summary]:
        """What has arrived since the last call, and belongs to this step."""
        while True:
            try:
                data = self._socket.recv(_FORM.size)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier datagram came back: its receiver is no more
            if len(data) != _FORM.size:
                continue
            token, rank, stage, op, microbatch, depth, time, until, swing, step = _FORM.unpack(data)
            if token == self._token and step == self.step:
                yield Summary(rank, Action(stage, Op(op), microbatch), time, until, swing, depth)

    def close(self) -> None:
        self._socket.close()
