"""Costs from a measured trace: what a step would take if nothing but its passes and links took time."""

from __future__ import annotations

import numpy as np

from pipeswift.cost import Costs, activations
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op, Schedule
from pipeswift.trace import ALL_TO_ALL, COMPUTE, Trace


def measured_costs(
    schedule: Schedule,
    trace: Trace,
    *,
    latency: float | np.ndarray = 0.0,
    bandwidth: float = float("inf"),
    boundary_bytes: float = 0.0,
) -> Costs:
    """The seconds per pass that `trace` measured in one step of `schedule`, with the given links.

    So `replay(schedule, measured_costs(schedule, trace))` is that step without the runtime's own share. Several spans
    of one pass on its compute lane add up; one with all-to-alls lasts from its first start to its last end, since it
    waits for them. An Overlap lasts as long as those of its two stages did on average. A pass that did not run is NaN,
    and `replay` refuses a schedule with it.
    latency, bandwidth as in Costs; boundary_bytes at every boundary. Memory counts activations.
    Raises PipeSwiftError when the trace has a span outside the schedule.
    """
    spans = trace.only(trace.lane == COMPUTE)
    shape = len(Op), schedule.num_stages, schedule.num_microbatches
    passes = spans.op, spans.stage, spans.microbatch
    if any(index.max(initial=0) >= size for index, size in zip(passes, shape, strict=True)):
        raise PipeSwiftError(
            f"the trace goes to stage {spans.stage.max()} and micro-batch {spans.microbatch.max()}, but schedule "
            f"{schedule.name} has {shape[1]} stages and {shape[2]} micro-batches: give the schedule that ran."
        )
    seconds = np.zeros(shape)
    np.add.at(seconds, passes, spans.end - spans.start)
    first, last = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.minimum.at(first, passes, spans.start)
    np.maximum.at(last, passes, spans.end)
    sent = trace.only((trace.lane == ALL_TO_ALL) & (trace.op != Op.W))  # W there is a reduction of gradients
    waits = np.zeros(shape, dtype=np.bool_)
    waits[sent.op, sent.stage, sent.microbatch] = True
    seconds[waits] = (last - first)[waits]
    ran = np.zeros(shape, dtype=np.bool_)
    ran[passes] = True
    return Costs(
        seconds=np.where(ran, seconds, np.nan),
        memory=activations(schedule.num_stages, schedule.chunks),
        boundary_bytes=np.full(schedule.num_stages - 1, float(boundary_bytes)),
        latency=latency,
        bandwidth=bandwidth,
        overlap=_pairs(schedule, first, last) if schedule.overlaps else None,
    )


def _pairs(schedule: Schedule, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Mean seconds from the start to the end of the Overlaps of each two stages, shape (stages, stages); NaN for none.

    first, last: when each (op, stage, micro-batch) started and ended; infinite for what did not run.
    """
    total, count = np.zeros((2, schedule.num_stages, schedule.num_stages))
    for order in schedule.orders:
        one, other = order.rows[order.joined], order.rows[order.joined + 1]
        start = np.minimum(*(first[op, stage, i] for stage, op, i in (one.T, other.T)))
        end = np.maximum(*(last[op, stage, i] for stage, op, i in (one.T, other.T)))
        ran = np.isfinite(start)
        pair = one[ran, 0], other[ran, 0]
        np.add.at(total, pair, (end - start)[ran])
        np.add.at(count, pair, 1.0)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
