"""A replay with the fitted latency takes as long as the step did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.simulate import fitted_latency, replay
from pipeswift.trace import longest_span


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize("latency", [0.0, 0.1, 0.7])
def test_the_latency_of_a_replayed_step_is_found_again(name, latency):
    schedule = schedules.build(name, 4, 8)
    costs = Costs.uniform(schedule.num_stages)
    span = longest_span(replay(schedule, replace(costs, latency=latency)))
    assert fitted_latency(schedule, costs, span) == pytest.approx(latency, abs=span / 4096)


def test_a_step_that_took_no_longer_than_its_passes_shows_no_latency():
    schedule = schedules.build("1f1b", 4, 8)
    assert fitted_latency(schedule, Costs.uniform(4), span=1.0) == 0.0


def test_one_rank_has_no_links():
    assert fitted_latency(schedules.build("1f1b", 1, 8), Costs.uniform(1), span=100.0) == 0.0
