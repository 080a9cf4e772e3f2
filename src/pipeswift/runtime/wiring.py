"""All channels of one rank: which of its products go to which rank, and which come from where."""

from __future__ import annotations

import atexit
from itertools import pairwise
from typing import NamedTuple

from pipeswift.ir import Product, Schedule
from pipeswift.runtime.channel import Expected, Inbox, Outbox, Receiver, Sender
from pipeswift.runtime.peers import Peers


class ChannelKey(NamedTuple):
    """boundary b lies between stages b and b + 1; OUTPUT crosses it forward, GRADIENT backward."""

    boundary: int
    product: Product
    route: int


class Wiring:
    """The channels for a placement (`routes`); schedules with the same routes share them. inbox: for arrivals."""

    def __init__(self, peers: Peers, routes: tuple[tuple[int, ...], ...], inbox: Inbox):
        self.inbox = inbox
        self.outbox = Outbox(self.inbox)
        self.senders: dict[ChannelKey, Sender] = {}
        self.receivers: dict[ChannelKey, Receiver] = {}
        for tag, (key, source, target) in enumerate(_channels(routes)):
            group = peers.forward if key.product is Product.OUTPUT else peers.backward
            assert group is not None, "a pipeline of one rank has no channel"
            maker = key.boundary if key.product is Product.OUTPUT else key.boundary + 1
            if source == peers.rank:
                what = f"output of stage {maker}"
                self.senders[key] = Sender(group, target, tag, self.outbox, what, peers.device)
            elif target == peers.rank:
                self.receivers[key] = Receiver(group, source, tag, self.inbox, key.product, maker, peers.device)

        self._idle = True
        atexit.register(self._at_exit)

    def begin(self, schedule: Schedule) -> None:
        """A step starts: senders announce anew, and receivers expect one output per micro-batch of their route."""
        self._idle = False
        for sender in self.senders.values():
            sender.begin(schedule.num_microbatches)
        for key, receiver in self.receivers.items():
            if key.product is Product.OUTPUT:
                mine = [i for i, route in enumerate(schedule.route_of) if route == key.route]
                for microbatch in mine:
                    first = microbatch == mine[0]
                    receiver.expect(Expected(microbatch, shapes=None, first=first, of=schedule.num_microbatches))

    def end(self) -> None:
        """A step is over, and this rank has all that it expected."""
        self.outbox.flush()
        self._idle = True

    def _at_exit(self) -> None:
        # A thread that still waits for a delivery would abort the interpreter's orderly end. After a step that failed
        # threads may wait for good, and the watchdog sees to the end.
        if self._idle:
            self.close()

    def close(self) -> None:
        """Ends the threads. Only between steps."""
        atexit.unregister(self._at_exit)
        for receiver in self.receivers.values():
            receiver.close()
        self.outbox.close()


def _channels(routes: tuple[tuple[int, ...], ...]) -> list[tuple[ChannelKey, int, int]]:
    """(key, source rank, target rank) of every channel of the pipeline, in an order that all ranks share."""
    found = []
    for route, holders in enumerate(routes):
        for boundary, (before, after) in enumerate(pairwise(holders)):
            if before != after:
                found.append((ChannelKey(boundary, Product.OUTPUT, route), before, after))
                found.append((ChannelKey(boundary, Product.GRADIENT, route), after, before))
    return found
