"""How fast a replay is: 1F1B at growing sizes, its backward whole and split.

    .venv/bin/python bench/replay.py [--json FILE]

Each row runs in a process of its own. Peaks are resident memory: of making the schedule, above what the process held
before, and of the whole process after the replays. The kernel is timed warm, over arrays made before, in processor
time; a replay is all of it, from schedule to trace, of which `prepare` checks and packs, both in elapsed time. Times
are the best of five, generation's of one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np

from pipeswift.cost import Costs
from pipeswift.ir import Schedule
from pipeswift.passes import split_backward
from pipeswift.schedules import build
from pipeswift.simulate import replay
from pipeswift.simulate.replay import prepare

SIZES = [(8, 512, "whole"), (64, 512, "whole"), (64, 4096, "whole"), (1024, 4096, "whole"), (1024, 4096, "split")]
REPEATS = 5


class Row(NamedTuple):
    """One line of the table; seconds, MiB, and actions per second."""

    ranks: int
    microbatches: int
    backward: str
    actions: int
    generate_seconds: float
    generate_peak_mib: float
    kernel_actions_per_second: float
    prepare_seconds: float
    replay_seconds: float
    peak_mib: float


def measure(ranks: int, microbatches: int, backward: str) -> Row:
    """One row, in this process."""
    replay(build("1f1b", 2, 2), Costs.uniform(2))
    before = memory("VmRSS")
    begin = perf_counter()
    schedule = build("1f1b", ranks, microbatches)
    if backward == "split":
        schedule = split_backward(schedule)
    generated, grown = perf_counter() - begin, memory("VmHWM") - before

    costs = Costs.uniform(ranks)
    return Row(
        ranks=ranks,
        microbatches=microbatches,
        backward=backward,
        actions=schedule.num_actions,
        generate_seconds=generated,
        generate_peak_mib=grown,
        kernel_actions_per_second=schedule.num_actions / kernel_seconds(schedule, costs),
        prepare_seconds=best(lambda: prepare(schedule, costs)),
        replay_seconds=best(lambda: replay(schedule, costs)),
        peak_mib=memory("VmHWM"),
    )


def kernel_seconds(schedule: Schedule, costs: Costs) -> float:
    """Processor time of the compiled loop alone."""
    from pipeswift.simulate.kernel import play

    work = prepare(schedule, costs)
    seconds = []
    for _ in range(REPEATS):
        work.arrival.fill(np.nan)
        begin = process_time()
        play(*work)
        seconds.append(process_time() - begin)
    return min(seconds)


def best(function: Callable[[], object]) -> float:
    """The least seconds that `function` takes."""
    seconds = []
    for _ in range(REPEATS):
        begin = perf_counter()
        function()
        seconds.append(perf_counter() - begin)
    return min(seconds)


def memory(field: str) -> float:
    """MiB, by this process's own account in /proc: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def show(row: Row) -> str:
    """One line of the table."""
    return (
        f"{row.ranks:>5} {row.microbatches:>6} {row.backward:>8} {row.actions:>11,} {row.generate_seconds:>11.3f} "
        f"{row.generate_peak_mib:>12.0f} {row.kernel_actions_per_second / 1e6:>13.1f} {row.prepare_seconds:>10.3f} "
        f"{row.replay_seconds:>9.3f} {row.peak_mib:>9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast a replay is.")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    path = parser.parse_args().json

    print("    p      m backward     actions  generate s  its peak MiB  kernel M/s  prepare s  replay s  peak MiB")
    rows = []
    for size in SIZES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            rows.append(fresh.submit(measure, *size).result())
        print(show(rows[-1]), flush=True)
    if path:
        path.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
