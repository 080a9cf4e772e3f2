"""The figures of one timeline."""

from __future__ import annotations

from dataclasses import dataclass

from pipeswift.cost import activations
from pipeswift.ir import Schedule
from pipeswift.trace import Trace, bubble_rate, longest_span, makespan, peak_memory


@dataclass(frozen=True)
class Summary:
    """What people compare; the field names are those of the JSON that `pipeswift simulate` writes.

    makespan, longest_span: seconds. bubble_rate_*: between 0 and 1. peak_activations: per rank, in units of one
    rank's share of the model for one micro-batch. parameters: on the rank with the most, in such shares; 2 where every
    stage is on two ranks.
    """

    schedule: str
    pp: int
    microbatches: int
    chunks: int
    makespan: float
    longest_span: float
    bubble_rate_span: float
    bubble_rate_makespan: float
    peak_activations: tuple[float, ...]
    parameters: float = 1.0


def summarize(schedule: Schedule, trace: Trace) -> Summary:
    """The figures of `trace`, a simulated or measured run of `schedule`.

    Raises EmptyTrace when no span was recorded.
    """
    peaks = peak_memory(trace, activations(schedule.num_stages, schedule.chunks))
    return Summary(
        schedule=schedule.name,
        pp=schedule.num_ranks,
        microbatches=schedule.num_microbatches,
        chunks=schedule.chunks,
        makespan=makespan(trace),
        longest_span=longest_span(trace),
        bubble_rate_span=bubble_rate(trace, by="span"),
        bubble_rate_makespan=bubble_rate(trace, by="makespan"),
        peak_activations=tuple(round(peak, 9) for peak in peaks.tolist()),  # thirds of a unit add up to whole units
        parameters=schedule.parameters,
    )
