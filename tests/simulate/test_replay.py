"""Replay: when a pass starts, what a message costs, how an Overlap lasts, and what cannot go on."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Order, Schedule
from pipeswift.schedules import build
from pipeswift.simulate import CostsMismatch, Deadlock, replay
from pipeswift.trace import makespan
from tests.simulate.written import ends, starts, written

PAIR = written("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_a_pass_starts_when_its_rank_is_free_and_its_input_is_there():
    trace = replay(PAIR, Costs.uniform(2, F=1, I=1, W=1))
    assert starts(trace) == {"0F0": 0, "0F1": 1, "0B0": 4, "0B1": 7, "1F0": 1, "1B0": 2, "1F1": 4, "1B1": 5}
    assert makespan(trace) == 9


def test_a_message_to_another_rank_takes_the_latency_and_occupies_nothing():
    trace = replay(PAIR, Costs.uniform(2, F=1, I=1, W=1, comm=0.5))
    assert starts(trace) == {"0F0": 0, "0F1": 1, "0B0": 5, "0B1": 8, "1F0": 1.5, "1B0": 2.5, "1F1": 4.5, "1B1": 5.5}


def test_between_stages_of_one_rank_nothing_is_sent():
    schedule = written("0F0 1F0 1B0 0B0", routes=((0, 0),))
    assert makespan(replay(schedule, Costs.uniform(2, comm=100.0, boundary_bytes=1.0))) == 6


def test_latency_may_differ_by_direction():
    latency = np.array([[0.0, 0.25], [2.0, 0.0]])
    trace = replay(PAIR, replace(Costs.uniform(2), latency=latency))
    assert starts(trace)["1F0"] == 1.25
    assert starts(trace)["0B0"] == ends(trace)["1B0"] + 2.0


def test_each_boundary_has_its_bytes_in_both_directions():
    schedule = written("0F0 0B0", "1F0 1B0", "2F0 2B0")
    costs = replace(Costs.uniform(3), boundary_bytes=np.array([10.0, 30.0]), bandwidth=10.0)
    trace = replay(schedule, costs)
    assert starts(trace) == {"0F0": 0, "1F0": 2, "2F0": 6, "2B0": 7, "1B0": 12, "0B0": 15}


def test_every_pass_of_every_micro_batch_may_have_its_own_time():
    seconds = np.arange(16, dtype=float).reshape(4, 2, 2)
    trace = replay(PAIR, replace(Costs.uniform(2), seconds=seconds))
    taken = {name: ends(trace)[name] - start for name, start in starts(trace).items()}
    assert taken == {"0F0": 0, "0F1": 1, "1F0": 2, "1F1": 3, "0B0": 12, "0B1": 13, "1B0": 14, "1B1": 15}


class TestSerialChannels:
    def test_messages_queue_in_the_order_they_were_sent(self):
        schedule = written("0F0 0F1 0F2", "1F0 1F1 1F2")
        free = replace(Costs.uniform(2, comm=0.5, boundary_bytes=2.0), bandwidth=1.0)
        times = starts(replay(schedule, free))
        assert [times[f"1F{i}"] for i in range(3)] == [3.5, 4.5, 5.5]
        times = starts(replay(schedule, replace(free, serial_channels=True)))
        assert [times[f"1F{i}"] for i in range(3)] == [3.5, 5.5, 7.5]

    def test_a_small_message_stalls_behind_a_large_one(self):
        schedule = written("0F0 0F1 2F0", "1F0 3F0 1F1")
        free = replace(Costs.uniform(4), boundary_bytes=np.array([4.0, 0.0, 1.0]), bandwidth=1.0)
        assert starts(replay(schedule, free))["3F0"] == 8
        assert starts(replay(schedule, replace(free, serial_channels=True)))["3F0"] == 10

    def test_the_two_directions_are_two_channels(self):
        schedule = written("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
        free = replace(Costs.uniform(2, boundary_bytes=1.0), bandwidth=1.0)
        assert starts(replay(schedule, replace(free, serial_channels=True))) == starts(replay(schedule, free))

    def test_interleaving_stalls_only_when_transfers_outlast_passes(self):
        schedule = build("interleaved-1f1b", 2, 8, chunks=2)

        def slower(transfer):
            free = replace(Costs.uniform(4, F=20, I=20, W=20, chunks=2, boundary_bytes=transfer), bandwidth=1.0)
            return makespan(replay(schedule, replace(free, serial_channels=True))) - makespan(replay(schedule, free))

        assert slower(transfer=1.0) == 0  # a tenth of a forward
        assert slower(transfer=30.0) == 60


class TestOverlap:
    # Rank 0 weaves the second forward into the first backward.
    SCHEDULE = written("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1")

    def test_without_a_time_of_its_own_its_parts_follow_each_other(self):
        trace = replay(self.SCHEDULE, Costs.uniform(2))
        assert (starts(trace)["0F1"], ends(trace)["0F1"]) == (4, 5)
        assert (starts(trace)["0B0"], ends(trace)["0B0"]) == (5, 7)
        assert starts(trace)["1F1"] == 5  # the first part's output leaves at that part's end

    def test_with_one_both_parts_last_that_long(self):
        trace = replay(self.SCHEDULE, replace(Costs.uniform(2), overlap=2.5))
        assert starts(trace)["0F1"] == starts(trace)["0B0"] == 4
        assert ends(trace)["0F1"] == ends(trace)["0B0"] == 6.5
        assert starts(trace)["1F1"] == 6.5

    def test_a_time_may_be_that_of_the_two_stages(self):
        pairs = np.array([[np.nan, 1.5], [2.5, np.nan]])
        schedule = written("0F0 1F0 1B0 (0F1;0B0)OVERLAP_F_B 1F1 1B1 0B1", stages=2)
        assert makespan(replay(schedule, replace(Costs.uniform(2), overlap=pairs))) == 1 + 1 + 2 + 3 + 1 + 2 + 2
        schedule = written("0F0 1F0 (0F1;1B0)OVERLAP_F_B (1F1;0B0)OVERLAP_F_B 1B1 0B1", stages=2)
        assert makespan(replay(schedule, replace(Costs.uniform(2), overlap=pairs))) == 1 + 1 + 1.5 + 2.5 + 2 + 2


def test_two_opposite_routes_meet_on_every_rank():
    schedule = written("0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1", routes=((0, 1), (1, 0)))
    assert makespan(replay(schedule, Costs.uniform(2))) == 6


def test_the_trace_is_grouped_by_rank_in_program_order():
    schedule = build("1f1b", 3, 4)
    trace = replay(schedule, Costs.uniform(3))
    rows = np.stack([trace.stage, trace.op, trace.microbatch], axis=1)
    assert np.array_equal(rows, np.concatenate([order.rows for order in schedule.orders]))
    assert trace.rank.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert trace.num_ranks == 3
    assert trace.name == "1f1b"


class TestDeadlock:
    def test_names_ranks_actions_and_what_they_miss(self):
        schedule = written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
        with pytest.raises(Deadlock) as caught:
            replay(schedule, Costs.uniform(2))
        assert str(caught.value) == (
            "schedule written cannot finish: 2 of 2 ranks are stuck.\n"
            "  rank 0 cannot start 0B0: needs the gradient of stage 1, micro-batch 0, from rank 1\n"
            "  rank 1 cannot start 1F1: needs the output of stage 0, micro-batch 1, from rank 0"
        )

    def test_names_a_few_of_many(self):
        schedule = written(*(f"{r}B0 {r}F0" for r in range(9)))
        with pytest.raises(Deadlock, match=r"9 of 9 ranks are stuck(.*\n){5}  and 5 more\Z") as caught:
            replay(schedule, Costs.uniform(9))
        assert [stuck.rank for stuck in caught.value.stuck] == list(range(9))

    def test_an_overlap_waits_for_the_inputs_of_both_parts(self):
        schedule = written("0F0 0B0 0F1 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
        with pytest.raises(Deadlock) as caught:
            replay(schedule, Costs.uniform(2))
        assert str(caught.value.stuck[1].entry) == "(1F1;1B0)OVERLAP_F_B"


class TestMismatch:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"seconds": np.ones((4, 3, 1))}, r"costs.seconds has shape \(4, 3, 1\).*\(4, 2, 1\) or \(4, 2, 2\)"),
            ({"seconds": np.ones((4, 2, 3))}, r"costs.seconds has shape \(4, 2, 3\).*2 micro-batches"),
            ({"boundary_bytes": np.ones(2)}, r"costs.boundary_bytes has shape \(2,\).*\(1,\)"),
            ({"latency": np.ones((3, 3))}, r"costs.latency has shape \(3, 3\).*\(\) or \(2, 2\)"),
            ({"latency": -1.0}, "negative"),
            ({"bandwidth": 0.0}, "costs.bandwidth is 0.0"),
        ],
    )
    def test_says_which_shape_fits(self, change, says):
        with pytest.raises(CostsMismatch, match=says):
            replay(PAIR, replace(Costs.uniform(2), **change))

    def test_a_pass_without_a_measured_time(self):
        costs = Costs.uniform(2)
        costs.seconds[3, 1, 0] = np.nan
        with pytest.raises(CostsMismatch, match="no number for 1B0"):
            replay(PAIR, costs)

    def test_rows_outside_the_schedule_are_refused(self):
        schedule = Schedule((Order(np.array([[7, 0, 0]])),), routes=((0,),), route_of=(0,))
        with pytest.raises(PipeSwiftError, match="no stage 7, op 0, micro-batch 0 among its 1 stages"):
            replay(schedule, Costs.uniform(1))

    def test_another_rank_s_stage_is_refused(self):
        schedule = written("0F0 1F0", "1B0", routes=((0, 1),))
        with pytest.raises(PipeSwiftError, match=r"rank 0: 1F0 does not belong there.* stage 1 on rank 1"):
            replay(schedule, Costs.uniform(2))


def test_importing_the_simulator_loads_neither_torch_nor_numba():
    code = "import sys, pipeswift.simulate; print({'torch', 'numba'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
