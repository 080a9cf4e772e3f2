"""Another process is alive, stopped or gone, and only the one that was meant is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeswift.runtime.process import Condition, Process


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_is_alive_then_stopped_then_gone(child: subprocess.Popen):
    process = Process.of(child.pid)
    assert process.condition() is Condition.ALIVE
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process.condition() is Condition.STOPPED
    process.kill()
    child.wait()
    assert process.condition() is Condition.GONE


def test_a_later_process_with_the_same_number_is_left_alone(child: subprocess.Popen):
    earlier = Process.of(child.pid)._replace(started="1")
    assert earlier.condition() is Condition.GONE
    earlier.kill()
    assert child.poll() is None


def test_a_process_of_another_host_is_out_of_reach(child: subprocess.Popen):
    elsewhere = Process.of(child.pid)._replace(host="elsewhere")
    assert elsewhere.condition() is Condition.UNKNOWN
    elsewhere.kill()
    assert child.poll() is None


def test_a_process_does_not_end_itself():
    Process.here().kill()
    assert Process.here().condition() is Condition.ALIVE
