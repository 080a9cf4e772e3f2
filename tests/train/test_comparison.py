"""A prediction is the replay of what was measured, so a simulated run predicts itself."""

from dataclasses import replace

import numpy as np
import pytest

from pipeswift import schedules, simulate
from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.simulate import replay
from pipeswift.trace import makespan
from pipeswift.train.comparison import compare

SCHEDULE = schedules.build("1f1b", 3, 4)


def run(slowdown=1.0, comm=0.0):
    return replay(SCHEDULE, Costs.uniform(3, F=slowdown, I=slowdown, W=slowdown, comm=comm))


def test_a_run_without_overhead_is_predicted_exactly():
    comparison = compare(SCHEDULE, [[run()]])
    assert np.array_equal(comparison.predicted.start, comparison.measured.start)
    assert comparison.error == 0


def test_what_messages_and_gaps_take_is_the_error():
    comparison = compare(SCHEDULE, [[run(comm=0.5)]])
    assert makespan(comparison.predicted) == makespan(run())
    assert comparison.error == pytest.approx(makespan(run(comm=0.5)) / makespan(run()) - 1)


def test_the_step_of_median_length_is_chosen():
    steps = [[run(slowdown)] for slowdown in (3.0, 1.0, 2.0)]
    assert makespan(compare(SCHEDULE, steps).measured) == makespan(run(2.0))


def test_copies_that_wait_for_each_other_are_predicted_too():
    order = schedules.pipedream(3, 4, (2, 1))
    seconds = np.ones((4, 2, 4))
    seconds[Op.B, 0, 1:3] = 6.0
    measured = simulate.run(order, replace(Costs.uniform(2), seconds=seconds), updates_every=2)
    assert compare(order, [[measured]], updates_every=2).error == 0
    assert compare(order, [[measured]]).error > 0


def test_replicas_are_kept_and_the_first_is_predicted():
    comparison = compare(SCHEDULE, [[run(1.0), run(3.0)]])
    assert [trace.name for trace in comparison.replicas] == ["replica 0", "replica 1"]
    assert makespan(comparison.predicted) == makespan(comparison.measured) == makespan(run())
    assert makespan(comparison.replicas[1]) == makespan(run(3.0))
