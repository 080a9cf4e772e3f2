"""Metrics read off small timelines."""

import numpy as np
import pytest

from pipeswift.cost import activations
from pipeswift.ir import Op
from pipeswift.trace import (
    ALL_TO_ALL,
    COMPUTE,
    EmptyTrace,
    Trace,
    bubble_rate,
    busy_per_rank,
    longest_span,
    makespan,
    memory_curve,
    peak_memory,
    spans_per_rank,
    whole_passes,
)


def trace_of(*spans, ranks=2, lane=COMPUTE) -> Trace:
    """Spans are (rank, op, micro-batch, start, end); every rank holds the stage of its own number."""
    rank, op, microbatch, start, end = zip(*spans, strict=True) if spans else [()] * 5
    whole = [np.array(column, dtype=np.int32) for column in (rank, rank, op, microbatch)]
    times = [np.array(column, dtype=np.float64) for column in (start, end)]
    return Trace(ranks, *whole, *times, lane=np.full(len(spans), lane, dtype=np.int32))


# rank 0  F0 .. .. .. B0 B0
# rank 1     F0 B0 B0
ONE_MICROBATCH = trace_of((0, Op.F, 0, 10, 11), (0, Op.B, 0, 14, 16), (1, Op.F, 0, 11, 12), (1, Op.B, 0, 12, 14))


class TestTime:
    def test_makespan_is_over_all_ranks_and_a_span_is_one_rank_s(self):
        assert makespan(ONE_MICROBATCH) == 6
        assert spans_per_rank(ONE_MICROBATCH).tolist() == [6, 3]
        assert longest_span(ONE_MICROBATCH) == 6

    def test_the_two_bubble_rates_differ_when_no_rank_is_there_from_start_to_end(self):
        # rank 0  F0 F1 .. .. W0 of an order whose ranks start and end one after the other
        skewed = trace_of((0, Op.F, 0, 0, 4), (1, Op.F, 0, 4, 8))
        assert bubble_rate(skewed, by="span") == 0
        assert bubble_rate(skewed, by="makespan") == 0.5
        assert bubble_rate(ONE_MICROBATCH, by="span") == bubble_rate(ONE_MICROBATCH, by="makespan") == 0.5

    def test_busy_time_is_that_of_the_compute_lane(self):
        assert busy_per_rank(ONE_MICROBATCH).tolist() == [3, 3]
        assert busy_per_rank(trace_of((0, Op.F, 0, 0, 1), lane=ALL_TO_ALL)).tolist() == [0, 0]

    def test_overlapped_passes_are_busy_once(self):
        woven = trace_of((0, Op.F, 1, 0, 5), (0, Op.B, 0, 0, 5), (0, Op.F, 2, 4, 6), (0, Op.B, 1, 8, 9), ranks=1)
        assert busy_per_rank(woven).tolist() == [7]

    def test_a_rank_without_spans_has_no_time(self):
        idle = trace_of((0, Op.F, 0, 1, 2), ranks=3)
        assert spans_per_rank(idle).tolist() == busy_per_rank(idle).tolist() == [1, 0, 0]
        assert bubble_rate(idle, by="span") == pytest.approx(2 / 3)

    def test_passes_of_no_length_leave_no_bubble(self):
        assert bubble_rate(trace_of((0, Op.F, 0, 1, 1)), by="span") == 0

    @pytest.mark.parametrize("metric", [makespan, spans_per_rank, longest_span, lambda t: bubble_rate(t, by="span")])
    def test_an_empty_trace_has_no_metric(self, metric):
        with pytest.raises(EmptyTrace, match="record or simulate at least one pass"):
            metric(trace_of())


class TestMemory:
    def test_grows_at_the_start_of_f_and_falls_at_the_end_of_b(self):
        times, level = memory_curve(ONE_MICROBATCH, activations(2), 0)
        kept = level[np.isin(times, (10, 16))]
        assert (times[0], times[-1]) == (10, 16)
        assert (kept[0], kept[-1]) == (1, 0)

    def test_an_end_comes_before_the_start_of_the_same_moment(self):
        spans = trace_of((0, Op.F, 0, 0, 1), (0, Op.B, 0, 1, 2), (0, Op.F, 1, 2, 3), (0, Op.B, 1, 3, 4), ranks=1)
        assert peak_memory(spans, activations(1)).tolist() == [1]

    def test_peaks_are_per_rank(self):
        spans = trace_of((0, Op.F, 0, 0, 1), (0, Op.F, 1, 1, 2), (1, Op.F, 0, 1, 2), (1, Op.B, 0, 2, 3))
        assert peak_memory(spans, activations(2)).tolist() == [2, 1]

    def test_what_i_frees_is_free_before_w(self):
        memory = np.array([[2.0], [-1.0], [-1.0], [-2.0]])
        spans = trace_of((0, Op.F, 0, 0, 1), (0, Op.I, 0, 1, 2), (0, Op.F, 1, 2, 3), (0, Op.W, 0, 3, 4), ranks=1)
        times, level = memory_curve(spans, memory, 0)
        assert times.tolist() == [0, 2, 2, 4]
        assert level.tolist() == [2, 1, 3, 2]


class TestSelection:
    def test_of_one_rank_s_lane(self):
        assert ONE_MICROBATCH.on(1).start.tolist() == [11, 12]
        assert len(ONE_MICROBATCH.on(1, ALL_TO_ALL)) == 0

    def test_by_mask_keeps_the_ranks(self):
        backwards = ONE_MICROBATCH.only(ONE_MICROBATCH.op == Op.B)
        assert backwards.rank.tolist() == [0, 1]
        assert backwards.num_ranks == 2

    def test_by_rank_in_one_pass(self):
        mixed = ONE_MICROBATCH.only(np.array([2, 0, 3, 1]))
        assert [spans.start.tolist() for spans in mixed.by_rank()] == [[10, 14], [11, 12]]
        assert [len(spans) for spans in trace_of((1, Op.F, 0, 0, 1), ranks=3).by_rank()] == [0, 1, 0]


def test_a_pass_of_several_spans_holds_its_memory_once():
    """A pass with all-to-alls has a span per piece of compute, and each was once counted as a pass."""
    whole = Trace(1, *columns([(0, 0, 0, 0.0, 3.0), (0, 3, 0, 3.0, 6.0)]))
    pieces = Trace(1, *columns([(0, 0, 0, 0.0, 1.0), (0, 0, 0, 2.0, 3.0), (0, 3, 0, 3.0, 4.0), (0, 3, 0, 5.0, 6.0)]))
    memory = np.array([[1.0], [0.0], [0.0], [-1.0]])
    for one, other in zip(memory_curve(whole, memory, 0), memory_curve(pieces, memory, 0), strict=True):
        assert np.array_equal(one, other)


def columns(spans):
    """(rank, stage, op, microbatch, start, end, lane) of spans (stage, op, microbatch, start, end) on rank 0."""
    stage, op, microbatch, start, end = map(np.array, zip(*spans, strict=True))
    zeros = np.zeros_like(stage)
    return zeros, stage, op, microbatch, start, end, zeros


def test_a_whole_pass_has_what_it_waits_for_inside():
    pieces = trace_of((0, Op.F, 0, 0, 1), (1, Op.F, 0, 2, 3), (0, Op.F, 0, 2, 4), (0, Op.B, 0, 5, 6))
    whole = whole_passes(pieces)
    assert list(zip(whole.rank, whole.op, whole.start, whole.end, strict=True)) == [
        (0, Op.F, 0, 4),
        (0, Op.B, 5, 6),
        (1, Op.F, 2, 3),
    ]
