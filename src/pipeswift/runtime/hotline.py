"""What members of an expert group tell each other while they agree: a connection from each follower to the leader."""

from __future__ import annotations

import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock, Thread

from pipeswift.ir import Action, Op, Product
from pipeswift.policy import LEADER, Message
from pipeswift.policy.agreement import Arrived, Go
from pipeswift.runtime.channel import Inbox
from pipeswift.runtime.groups import Group, peer_lost
from pipeswift.runtime.heartbeat import Address, home

_FORM = struct.Struct("<6i")  # step, kind of message, member, product or op, stage, micro-batch
_GO, _ARRIVED = range(2)
_LEFT = -1  # in place of a step: a member closes its end. Without that word, its process has ended
_CONNECTING = 60.0  # seconds that members wait for each other


class Hotline:
    """One member's connections, and a thread for each that hears. Every member must make one, at the same time.

    inbox: gets a None when something has come, so that who waits there looks, and what ended a connection.
    """

    def __init__(self, group: Group, inbox: Inbox):
        self._inbox = inbox
        self._heard: deque[tuple[int, Message]] = deque()  # (step, message)
        self._early: list[tuple[int, Message]] = []  # of a later step, in which others are already
        self._step = 0
        self.sent = 0  # packets in this step
        self._closing = False
        self._sending = Lock()
        self._lines = _connected(group)
        self._threads = [
            Thread(target=self._hear, args=(line,), name=f"hotline {number}", daemon=True)
            for number, line in enumerate(self._lines)
        ]
        for thread in self._threads:
            thread.start()

    def begin_step(self) -> None:
        self._step += 1
        self.sent = 0
        self._heard.extendleft(reversed(self._early))
        self._early.clear()

    def tell(self, messages: Sequence[Message]) -> None:
        """To the leader, or from it to all: one packet, and no wait for whoever reads it. From any thread."""
        packet = b"".join(_packed(self._step, message) for message in messages)
        with self._sending:
            for line in self._lines:
                with suppress(OSError):  # whoever hears on that line knows more
                    line.sendall(packet)
                    self.sent += 1

    def heard(self) -> Iterator[Message]:
        """What has come since the last call, and belongs to this step. Each member's in its order."""
        while self._heard:
            step, message = self._heard.popleft()
            if step == self._step:
                yield message
            elif step > self._step:
                self._early.append((step, message))

    def close(self) -> None:
        """Ends the threads. Only between steps."""
        self._closing = True
        for line in self._lines:
            with suppress(OSError):
                line.sendall(_FORM.pack(_LEFT, _GO, LEADER, 0, 0, 0))
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for line in self._lines:
            line.close()

    def _hear(self, line: socket.socket) -> None:
        """A thread's life."""
        lost: Exception = ConnectionError("a rank of the expert group has ended")
        rest, left = b"", False
        try:
            while not left and (data := line.recv(1 << 16)):
                rest += data
                whole = len(rest) // _FORM.size * _FORM.size
                for step, *fields in _FORM.iter_unpack(rest[:whole]):
                    left = left or step == _LEFT
                    self._heard.append((step, _unpacked(*fields)))
                rest = rest[whole:]
                self._inbox.put(None)
        except OSError as error:
            lost = error
        if not left and not self._closing:
            self._inbox.put(peer_lost(lost))


def _packed(step: int, message: Message) -> bytes:
    if isinstance(message, Arrived):
        member, product, stage, microbatch = message
        return _FORM.pack(step, _ARRIVED, member, product, stage, microbatch)
    stage, op, microbatch = message.action
    return _FORM.pack(step, _GO, LEADER, op, stage, microbatch)


def _unpacked(kind: int, member: int, what: int, stage: int, microbatch: int) -> Message:
    if kind == _ARRIVED:
        return Arrived(member, Product(what), stage, microbatch)
    return Go(Action(stage, Op(what), microbatch))


def _connected(group: Group) -> list[socket.socket]:
    """From the leader to all others, or from one of them to the leader. Raises PeerLost where one does not come."""
    local, host = home(group)
    try:
        if group.rank == LEADER:
            with socket.create_server((local, 0), backlog=group.size) as door:
                token = secrets.token_bytes(8)
                group.all_gather(((host, door.getsockname()[1]), token))
                door.settimeout(_CONNECTING)
                lines = [_admitted(door, token) for _ in range(group.size - 1)]
        else:
            address: Address
            address, token = group.all_gather(None)[LEADER]
            lines = [socket.create_connection(address, timeout=_CONNECTING)]
            lines[0].sendall(token)
    except OSError as error:
        raise peer_lost(error) from error
    for line in lines:
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return lines


def _admitted(door: socket.socket, token: bytes) -> socket.socket:
    """The next one at the door that knows `token`: another may be a stray."""
    while True:
        line, _ = door.accept()
        line.settimeout(1.0)
        with suppress(OSError):
            if line.recv(len(token), socket.MSG_WAITALL) == token:
                return line
        line.close()
