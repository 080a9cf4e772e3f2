"""Ranks that wait for each other in a store find out who is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from pipeswift.runtime import meeting
from pipeswift.runtime.meeting import MeshError, meet, occurrence, register
from pipeswift.runtime.process import Process

SHORT, LONG = timedelta(seconds=0.2), timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _a_world_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting, "_known", {})


def test_all_that_come_go_on():
    store = HashStore()
    other = threading.Thread(target=meet, args=(store, "start", 1, range(2), LONG))
    other.start()
    meet(store, "start", 0, range(2), LONG)
    other.join()


def test_all_that_are_missing_are_named():
    store = HashStore()
    store.set("start/2", "here")
    with pytest.raises(MeshError, match=r"rank 1, 3 did not start within 0\.2 s"):
        meet(store, "start", 0, range(4), SHORT)


def test_everybody_hears_of_it():
    store = HashStore()
    with pytest.raises(MeshError, match=r"rank 1, 2 did not reach pipeline 1 within"):
        meet(store, "pipeline 1", 0, range(3), SHORT)
    with pytest.raises(MeshError, match=r"rank 1, 2 did not reach pipeline 1 within 0\.2 s"):
        meet(store, "pipeline 1", 1, range(3), LONG)


def test_a_rank_whose_process_has_ended_is_not_waited_for():
    store = HashStore()
    register(store, 0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        store.set("process of rank 1", json.dumps(Process.of(child.pid)))
        assert child.stdin
        child.stdin.close()
    with pytest.raises(MeshError, match=r"rank 1 is gone: its process \S+ has ended"):
        meet(store, "pipeline 1", 0, range(2), LONG)


def test_occurrences_are_counted_per_store():
    store = HashStore()
    assert [occurrence(store, "pipelines of rank 0") for _ in range(3)] == [1, 2, 3]
    assert occurrence(HashStore(), "pipelines of rank 0") == 1
