"""Costs read off a trace."""

from dataclasses import replace

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op
from pipeswift.passes import split_backward
from pipeswift.schedules import build
from pipeswift.simulate import CostsMismatch, measured_costs, replay, run
from pipeswift.trace import ALL_TO_ALL, COMPUTE, Trace

SCHEDULE = build("1f1b", 3, 4)
COSTS = replace(Costs.uniform(3, comm=0.25), seconds=np.random.default_rng(0).integers(1, 9, (4, 3, 4)) / 8.0)
TRACE = replay(SCHEDULE, COSTS)


def test_the_replay_of_measured_costs_is_the_measured_timeline():
    again = replay(SCHEDULE, measured_costs(SCHEDULE, TRACE, latency=0.25))
    assert np.array_equal(again.start, TRACE.start)
    assert np.array_equal(again.end, TRACE.end)


def test_passes_that_did_not_run_have_no_cost():
    costs = measured_costs(SCHEDULE, TRACE)
    assert np.isnan(costs.seconds[[Op.I, Op.W]]).all()
    for simulate in (replay, run):
        with pytest.raises(CostsMismatch, match=r"no number for \dI0"):
            simulate(split_backward(SCHEDULE), costs)


def test_spans_of_one_pass_add_up():
    costs = measured_costs(SCHEDULE, TRACE.only(np.tile(np.arange(len(TRACE)), 2)))
    assert np.array_equal(costs.seconds[Op.F], 2 * COSTS.seconds[Op.F])


def test_other_lanes_do_not_count():
    costs = measured_costs(SCHEDULE, replace(TRACE, lane=TRACE.microbatch % 2))
    assert np.isnan(costs.seconds[Op.F, :, 1::2]).all()
    assert np.array_equal(costs.seconds[Op.F, :, ::2], COSTS.seconds[Op.F, :, ::2])


def test_a_trace_of_another_schedule_is_refused():
    with pytest.raises(PipeSwiftError, match="stage 2 and micro-batch 3, but schedule 1f1b has 2 stages and 4"):
        measured_costs(build("1f1b", 2, 4), TRACE)


def test_a_pass_with_all_to_alls_lasts_from_its_first_start_to_its_last_end():
    """It waits for them; a reduction of gradients, W on the same lane, is no part of a pass."""
    schedule = build("1f1b", 1, 1)
    spans = [
        (0, Op.F, 0.0, 1.0, COMPUTE),
        (0, Op.F, 1.0, 2.5, ALL_TO_ALL),
        (0, Op.F, 3.0, 4.0, COMPUTE),
        (0, Op.B, 4.0, 5.0, COMPUTE),
        (0, Op.B, 7.0, 8.0, COMPUTE),
        (0, Op.W, 5.0, 9.0, ALL_TO_ALL),
    ]
    stage, op, start, end, lane = map(np.array, zip(*spans, strict=True))
    zeros = np.zeros_like(stage)
    costs = measured_costs(schedule, Trace(1, zeros, stage, op, zeros, start, end, lane))
    assert costs.seconds[Op.F, 0, 0] == 4.0
    assert costs.seconds[Op.B, 0, 0] == 2.0


def test_an_overlap_lasts_as_long_as_it_was_measured():
    woven = build("1f1b-overlap", 3, 6)
    costs = replace(Costs.uniform(3, F=1.0, I=1.0, W=1.0), overlap=2.25)
    trace = replay(woven, costs)
    again = replay(woven, measured_costs(woven, trace))
    assert np.allclose(again.end, trace.end)
