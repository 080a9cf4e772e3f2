"""The pool of worker processes: results by rank, failures with their cause, and nothing left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.procs import CaseFailed

ROOT = Path(__file__).parents[1]


def sum_of_ranks(rank, world, start):
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return total


def who(rank, world):
    return os.getpid(), rank, world, torch.get_num_threads(), dist.get_world_size()


def last_rank_raises(rank, world):
    if rank == world - 1:
        raise ValueError(f"rank {rank} has had enough")
    dist.recv(torch.zeros(1), src=world - 1)


def first_rank_never_answers(rank, world):
    print("waiting for nobody", flush=True)
    if rank == 0:
        threading.Event().wait()


def first_rank_crashes(rank, world):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)


def unpicklable(rank, world):
    return threading.Lock()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_every_rank_returns_its_result(procs, world):
    expected = sum(10 + rank for rank in range(world))
    assert procs.run(sum_of_ranks, 10, world=world) == [torch.tensor([expected])] * world


def test_the_same_processes_serve_many_cases(procs):
    pids = [[answer[0] for answer in procs.run(who, world=4)] for _ in range(50)]
    assert pids == [pids[0]] * 50
    assert len({os.getpid(), *pids[0]}) == 5


def test_each_case_knows_its_place(procs):
    assert [answer[1:] for answer in procs.run(who, world=3)] == [(rank, 3, 1, 3) for rank in range(3)]


def test_an_exception_comes_back_with_rank_and_traceback(procs):
    with pytest.raises(CaseFailed, match="last_rank_raises on 3 ranks") as failure:
        procs.run(last_rank_raises, world=3)
    assert "ValueError: rank 2 has had enough" in failure.value.errors[2]
    assert "in last_rank_raises" in failure.value.errors[2]


def test_a_hang_comes_back_with_the_stacks(procs):
    procs.run(who, world=2)  # workers are up, so the time below is all for the hang
    with pytest.raises(CaseFailed, match="did not answer in time") as failure:
        procs.run(first_rank_never_answers, world=2, timeout=2.0)
    assert "in first_rank_never_answers" in failure.value.errors[0]
    assert "waiting for nobody" in failure.value.errors[0]


def test_a_crash_comes_back_with_its_signal(procs):
    with pytest.raises(CaseFailed, match=f"exit code -{int(signal.SIGSEGV)}") as failure:
        procs.run(first_rank_crashes, world=2)
    assert "in first_rank_crashes" in failure.value.errors[0]


def test_a_result_that_cannot_travel_is_an_error(procs):
    with pytest.raises(CaseFailed, match="cannot pickle"):
        procs.run(unpicklable, world=1)


def test_a_failure_leaves_nothing_to_the_next_case(procs):
    with pytest.raises(CaseFailed):
        procs.run(last_rank_raises, world=2)
    assert procs.run(sum_of_ranks, 0, world=2) == [torch.tensor([1])] * 2


def test_workers_end_when_the_test_run_is_killed():
    script = """
import os, signal
from tests.procs import Pool
from tests.test_procs import who
if __name__ == "__main__":
    print(*(answer[0] for answer in Pool().run(who, world=2)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in run.communicate(timeout=60)[0].split()]
    assert len(pids) == 2
    assert all(ends(pid) for pid in pids)


def ends(pid: int) -> bool:
    """Whether the process is gone, or goes within 30 seconds."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    gone, _, _ = select.select([watch], [], [], 30)
    os.close(watch)
    return bool(gone)
