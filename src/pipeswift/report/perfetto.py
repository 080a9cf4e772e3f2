"""Timelines in Chrome's trace format: JSON that opens in Perfetto (ui.perfetto.dev) or chrome://tracing.

A process per trace and rank, a thread per lane, a complete event per span, a counter track per counter. A span that
starts before an earlier one of its lane has ended goes to a second thread of the lane, so that neither hides the other.
Format: "Trace Event Format", Google, events "X", "C" and "M"; times in microseconds from each trace's first start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import IO

import numpy as np

from pipeswift.report.palette import shares_time
from pipeswift.trace import LANES, Trace, memory_curve


def write(traces: Sequence[Trace], file: IO[str], memory: np.ndarray | None = None) -> None:
    """Write `traces` to `file`, all starting at time 0.

    memory: increments of shape (4, stages) as in `Costs.memory`; adds a counter "live activations" per rank.
    """
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    first_process = 0
    separator = ""
    for trace in traces:
        for event in _events(trace, first_process, memory):
            file.write(separator + event)
            separator = ",\n"
        first_process += trace.num_ranks
    file.write("\n]}\n")


def _events(trace: Trace, process: int, memory: np.ndarray | None) -> Iterator[str]:
    origin = float(trace.start.min(initial=np.inf)) if len(trace) else 0.0
    threads = trace.lane + len(LANES) * shares_time(trace)
    yield from chain(_names(trace, process, threads), _spans(trace, process, threads, origin))
    for counter in trace.counters:
        yield from _counter(counter.name, process + counter.rank, counter.time - origin, counter.value)
    if memory is None:
        return
    for rank, spans in enumerate(trace.by_rank()):
        times, levels = memory_curve(spans, memory, rank)
        yield from _counter("live activations", process + rank, times - origin, levels.round(9))


def _names(trace: Trace, process: int, threads: np.ndarray) -> Iterator[str]:
    title = f"{trace.name} rank" if trace.name else "rank"
    for rank in range(trace.num_ranks):
        pid = process + rank
        yield _metadata("process_name", pid, {"name": f"{title} {rank}"})
        yield _metadata("process_sort_index", pid, {"sort_index": pid})
        for thread in np.unique(threads[trace.rank == rank]).tolist():
            beside, lane = divmod(thread, len(LANES))
            name = f"{LANES[lane]}, beside it" if beside else LANES[lane]
            yield _metadata("thread_name", pid, {"name": name}, tid=thread)


def _metadata(name: str, pid: int, args: dict[str, object], tid: int = 0) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}, separators=(",", ":"))


def _spans(trace: Trace, process: int, threads: np.ndarray, origin: float) -> Iterator[str]:
    # Rounded to nanoseconds before subtracting, so that a span never reaches into the one that follows it.
    start = np.rint((trace.start - origin) * 1e9)
    length = np.rint((trace.end - origin) * 1e9) - start
    columns = (trace.rank + process, threads, trace.op, trace.stage, trace.microbatch, start / 1e3, length / 1e3)
    for pid, tid, op, stage, microbatch, ts, dur in zip(*(column.tolist() for column in columns), strict=True):
        name = f"{'FIWB'[op]}{microbatch}"
        yield (
            f'{{"name":"{name}","cat":"{"FIWB"[op]}","ph":"X","ts":{ts:.3f},"dur":{dur:.3f},"pid":{pid},"tid":{tid},'
            f'"args":{{"stage":{stage},"microbatch":{microbatch}}}}}'
        )


def _counter(name: str, pid: int, seconds: np.ndarray, values: np.ndarray) -> Iterator[str]:
    title = json.dumps(name)
    for time, value in zip((seconds * 1e6).tolist(), values.tolist(), strict=True):
        yield f'{{"name":{title},"ph":"C","ts":{time:.3f},"pid":{pid},"args":{{"value":{value}}}}}'
