"""A run never hangs in silence: whatever happens to one rank, all end, and say which one it was."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore

from pipeswift.runtime import Peers, Pipeline

PATIENCE = 2.5
LIMIT = PATIENCE + 10.0  # seconds after which every process has ended
RANKS = 3
ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """What is left of a run: exit codes and output by rank, and how long after the harm the last process ended."""

    codes: list[int]
    texts: list[str]
    seconds: float

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


@pytest.mark.parametrize(
    ("victim", "place", "harm"),
    [
        (1, "forward", "stop"),
        (0, "backward", "kill"),
        *(
            pytest.param(victim, place, harm, marks=pytest.mark.slow)
            for harm in ("kill", "stop")
            for place in ("build", "forward", "backward", "optimizer", "between")
            for victim in range(RANKS)
            if (victim, place, harm) not in ((1, "forward", "stop"), (0, "backward", "kill"))
        ),
    ],
)
def test_a_rank_that_dies_or_stops(victim: int, place: str, harm: str):
    ended = run(victim, place, harm)
    assert all(ended.codes)
    assert ended.codes[victim] == -signal.SIGKILL, "a stopped process is ended too"
    assert ended.seconds < LIMIT
    assert f"rank {victim} is {'stopped' if harm == 'stop' else 'gone'}" in ended.text
    assert ended.text.count("last done") == 1, "one table"


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("place", ["connecting", "connected"])
@pytest.mark.parametrize("harm", ["kill", "stop"])
def test_a_rank_that_dies_or_stops_before_there_is_a_pipeline(victim: int, place: str, harm: str):
    ended = run(victim, place, harm)
    assert all(ended.codes)
    assert ended.codes[victim] == -signal.SIGKILL
    assert ended.seconds < LIMIT
    assert f"rank {victim} is {'stopped' if harm == 'stop' else 'gone'}" in ended.text


def test_a_rank_that_raises():
    ended = run(2, "forward", "raise")
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < 8.0
    assert "rank 2 failed in step 2, F of stage 2, micro-batch 0: ValueError: a bad number" in ended.text
    assert "Traceback" in ended.texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["build", "backward", "optimizer", "between"])
def test_a_rank_that_raises_elsewhere(place: str):
    ended = run(1, place, "raise")
    assert all(ended.codes)
    assert ended.seconds < 8.0
    assert "rank 1 failed in" in ended.text
    assert "ValueError: a bad number" in ended.texts[0]


def test_a_rank_that_is_busy_for_too_long():
    ended = run(1, "forward", "sleep")
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < LIMIT
    assert "rank 1 is busy in F of stage 1, micro-batch 0" in ended.text
    assert "watchdog=SECONDS" in ended.text, "it says how to announce it"
    assert "F of stage 2, micro-batch 0 needs the output of stage 1 from rank 1" in ended.text


def test_a_rank_that_does_not_come_to_an_all_to_all():
    ended = run(1, "experts", "sleep")
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < LIMIT
    assert "rank 1 is busy in F of stage 0, micro-batch 0" in ended.text
    waits = "waits: F of stage 0, micro-batch 0 needs the all-to-all counts (layer with experts 0) with ranks 0, 1, 2"
    assert ended.text.count(waits) == 2


@pytest.mark.parametrize(
    ("victim", "harm", "says"),
    [
        (0, "kill", ["rank 0 is gone"]),
        *(
            pytest.param(victim, harm, says, marks=pytest.mark.slow)
            for victim, harm, says in (
                (0, "sleep", ["rank 0 is about to start F of stage 0", "waits for rank 0 to say what comes first"]),
                (0, "stop", ["rank 0 is stopped"]),
                (1, "kill", ["rank 1 is gone"]),
                (1, "raise", ["rank 1 failed in step 2"]),
            )
        ),
    ],
)
def test_a_rank_with_which_others_agree_on_what_to_run(victim: int, harm: str, says: list[str]):
    ended = run(victim, "word", harm)
    assert all(ended.codes)
    assert ended.seconds < LIMIT
    assert all(text in ended.text for text in says)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("sleep", ["rank 1 is busy in B of stage 0", "waits: the sum of update 2 of stage 0 over ranks 0, 1"]),
        pytest.param("kill", ["rank 1 is gone"], marks=pytest.mark.slow),
        pytest.param("raise", ["rank 1 failed in step 2, B of stage 0"], marks=pytest.mark.slow),
    ],
)
def test_a_rank_whose_gradients_its_copies_wait_for(harm: str, says: list[str]):
    ended = run(1, "backward", harm, COPIES="2 1")
    assert all(ended.codes)
    assert ended.seconds < LIMIT
    assert all(text in ended.text for text in says)


def test_idling_between_steps_is_no_fault_and_closing_leaves_nothing():
    ended = run(0, "between", "pause")
    assert ended.codes == [0, 0, 0], ended.text
    assert ended.texts == ["threads left: []\n"] * RANKS


@pytest.mark.slow
def test_a_rank_that_stays_away():
    ended = run(2, "between", "sleep")
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < LIMIT
    assert "rank 2 is in its own program, outside of the pipeline" in ended.text


@pytest.mark.slow
def test_evaluation_that_one_rank_enters_alone():
    ended = run(1, "evaluate", "none")
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < LIMIT
    assert "every rank must make the same calls" in ended.text


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ("microbatches", "this step has 2 micro-batches here, but 4 on the rank of stage 1"),
        pytest.param(
            "targets", "micro-batch 2: inputs hold 2 samples and targets 1 (dimension 0)", marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_passes_something_else_to_step(odd: str, says: str):
    # Another number of micro-batches was a hang, too few targets a wrong loss.
    ended = run(2, odd, "none")
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < 8.0
    assert all(says in text for text in ended.texts)


@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("harm", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_start(victim: int, harm: str):
    ended = run(victim, "start", harm, START="2", wait_for=[rank for rank in range(RANKS) if rank != victim])
    others = [text for rank, text in enumerate(ended.texts) if rank != victim]
    assert all(f"MeshError: rank {victim} did not start within 2 s" in text for text in others)
    assert all(ended.codes)
    assert ended.seconds < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["kill", "stop", "raise"])
def test_under_torchrun(harm: str):
    with started([*torchrun(), "1", "backward", harm], environment()) as agent:
        output, _ = agent.communicate(timeout=60)
    assert agent.returncode
    assert time.monotonic() - moment_of_harm(output) < LIMIT
    assert "ValueError: a bad number" in output if harm == "raise" else "rank 1" in output or "rank      : 1" in output


@pytest.mark.slow
def test_a_thousand_pipelines_leave_nothing_behind():
    """Once each closed pipeline kept its groups, with their threads and sockets, until a garbage collection."""
    for _ in range(500):
        lifetime()
    threads, everything, descriptors, memory = threading.active_count(), tasks(), open_files(), resident()
    for _ in range(500):
        lifetime()
    assert open_files() == descriptors
    assert threading.active_count() == threads
    assert tasks() <= everything + 2, "torch's own may come and go"
    assert resident() - memory < 5e6


# Running it.


def run(victim: int, place: str, harm: str, wait_for: list[int] | None = None, **settings: str) -> Ended:
    """The doomed run as processes of its own; those that do not end within a minute are killed, and that shows."""
    env = environment(settings)
    command = [sys.executable, "-m", "tests.runtime.doomed", str(victim), place, harm]
    with started_ranks(command, env) as ranks:
        for rank in range(RANKS) if wait_for is None else wait_for:
            ranks[rank].wait(timeout=60)
        end = time.monotonic()
        for process in ranks:
            if wait_for is not None:
                process.kill()
        texts = [process.communicate(timeout=60)[0] for process in ranks]
    seconds = 0.0 if harm == "pause" else end - moment_of_harm("\n".join(texts))
    return Ended([process.returncode for process in ranks], texts, seconds)


@contextmanager
def started_ranks(command: list[str], env: dict[str, str]) -> Iterator[list[subprocess.Popen[str]]]:
    ranks = [start(command, env | {"RANK": str(rank)}) for rank in range(RANKS)]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@contextmanager
def started(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = start(command, env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def environment(settings: dict[str, str] | None = None) -> dict[str, str]:
    """What torchrun would set, but for the rank."""
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "PATIENCE": str(PATIENCE),
        **(settings or {}),
    }


def torchrun() -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    return [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.runtime.doomed"]


def free_port() -> int:
    """Below the range that systems give to outgoing connections, so that nobody gets it before the run does."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def moment_of_harm(text: str) -> float:
    lines = [line for line in text.splitlines() if "harm at" in line]
    assert lines, f"it ended before any harm was done:\n{text}"
    return float(lines[0].split()[-1])


# Ranks as threads.


def lifetime() -> None:
    """Groups, a pipeline on each of two ranks, a step, and the end of it all."""
    store = HashStore()
    ranks = [threading.Thread(target=live, args=(store, rank)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()


def live(store: HashStore, rank: int) -> None:
    def group(name: str) -> Any:
        return dist.ProcessGroupGloo(PrefixStore(name, store), rank, 2, timedelta(seconds=60))

    peers = Peers(rank, 2, torch.device("cpu"), group("forward"), group("backward"), group("control"))
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss=lambda y, _: y.mean(), microbatches=2, mesh=peers)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(torch.ones(4, 4), torch.zeros(4))
    optimizer.step()
    pipe.close()


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
