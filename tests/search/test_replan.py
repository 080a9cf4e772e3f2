"""A schedule again, for other costs: the same places, memory and form of backward, in an order that wins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift import schedules
from pipeswift.cost import Costs, activations
from pipeswift.ir import Op, Schedule
from pipeswift.search import load, replanned
from pipeswift.search.anneal import anneal
from pipeswift.search.decode import decode
from pipeswift.search.packed import peaks
from pipeswift.simulate import replay
from pipeswift.trace import makespan
from pipeswift.verify import verify

NAMES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v", "v-min")


def costs_of(schedule: Schedule, factors: list[float]) -> Costs:
    """As measured: NaN for what the schedule has not."""
    costs = Costs.uniform(schedule.num_stages, F=1, I=1, W=1)
    seconds = costs.seconds * np.array(factors)[:, None]
    seconds[[Op.B] if schedule.splits_backward else [Op.I, Op.W]] = np.nan
    return replace(costs, seconds=seconds)


def held(schedule: Schedule) -> list[float]:
    return peaks(schedule, activations(schedule.num_stages)).tolist()


def test_behind_a_slow_first_stage_gpipe_becomes_1f1b():
    """The fast stage is done with each micro-batch long before the next comes, and need not wait for the last."""
    gpipe = schedules.build("gpipe", 2, 4)
    again = replanned(gpipe, costs_of(gpipe, [3, 1]))
    assert again.orders[1] == schedules.build("1f1b", 2, 4).orders[1]
    assert makespan(replay(gpipe, costs_of(gpipe, [3, 1]))) == 4 * (3 + 6) + 1 + 2
    assert makespan(replay(again, costs_of(gpipe, [3, 1]))) == 4 * (3 + 6)


def test_what_an_earlier_plan_found_stays_while_nothing_wins_more():
    gpipe = schedules.build("gpipe", 2, 4)
    again = replanned(gpipe, costs_of(gpipe, [3, 1]))
    assert replanned(gpipe, costs_of(gpipe, [1, 1]), current=again) is again


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_that_is_best_stays_as_it_is(name):
    schedule = schedules.build(name, 2, 1 if name.startswith(("gpipe", "v-")) else 4)
    assert replanned(schedule, Costs.uniform(schedule.num_stages)) is schedule


@settings(deadline=None, max_examples=50)
@given(
    name=st.sampled_from(NAMES),
    p=st.integers(2, 4),
    rounds=st.integers(1, 3),
    in_flight=st.sampled_from((None, 1, 3)),
    factors=st.lists(st.sampled_from((0.3, 1.0, 2.5)), min_size=8, max_size=8),
)
def test_it_is_a_schedule_of_the_same_kind_and_no_slower(name, p, rounds, in_flight, factors):
    schedule = schedules.build(name, p, p * rounds)
    costs = costs_of(schedule, factors[: schedule.num_stages])
    again = replanned(schedule, costs, in_flight)
    assert not verify(again)
    assert again.routes == schedule.routes
    assert again.num_actions == schedule.num_actions
    assert again.splits_backward == schedule.splits_backward
    assert makespan(replay(again, costs)) <= makespan(replay(schedule, costs))
    if again is not schedule:
        limit = held(schedule) if in_flight is None else [in_flight * schedule.chunks] * p
        assert all(most <= allowed for most, allowed in zip(held(again), limit, strict=True))
    assert replanned(schedule, costs, in_flight) == again


def test_what_is_loaded_is_all_that_replanning_needs():
    """Regression guard: a loop that is compiled for another type of argument takes seconds, on all ranks at once."""
    load()
    known = len(anneal.signatures), len(decode.signatures)
    for name in NAMES:
        schedule = schedules.build(name, 4, 8)
        replanned(schedule, costs_of(schedule, [1.0, 2.0, 0.5, 1.5] * schedule.chunks), 8)
    assert (len(anneal.signatures), len(decode.signatures)) == known
