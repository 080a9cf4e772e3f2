"""Heartbeats reach the other ranks of a run, and nothing else does."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pipeswift.runtime.groups import Group
from pipeswift.runtime.heartbeat import Heartbeat


def pair() -> tuple[Heartbeat, Heartbeat]:
    store = HashStore()

    def make(rank: int) -> Heartbeat:
        control: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        return Heartbeat(Group(rank, 2, control), hosts_differ=False)

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(make, range(2))
    return one, other


def test_a_message_arrives_with_its_rank():
    one, other = pair()
    one.send(["step 1", 2.5])
    assert next(other.receive(10.0)) == (0, ["step 1", 2.5])
    one.close()
    other.close()


def test_strays_are_dropped():
    one, other = pair()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"hello", b"[1]", json.dumps(["another run", 0, "stop"]).encode()):
            stranger.sendto(data, ("127.0.0.1", other.port))
    one.send("mine")
    assert next(other.receive(10.0)) == (0, "mine")
    one.close()
    other.close()


def test_it_can_be_woken():
    one, other = pair()
    waiting = threading.Thread(target=lambda: list(other.receive(60.0)))
    waiting.start()
    other.wake()
    waiting.join(10.0)
    assert not waiting.is_alive()
    one.close()
    other.close()


def test_a_rank_that_is_no_more_disturbs_nobody():
    one, other = pair()
    one.close()
    other.send("anyone?")
    assert list(other.receive(0.05)) == []
    other.close()
