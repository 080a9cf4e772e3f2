"""The published version formulas, read off the orders."""

from dataclasses import replace

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.ir import Order, Schedule
from pipeswift.schedules import dualpipe, gpipe, one_f_one_b, pipedream, zb_h1
from pipeswift.simulate import replay
from pipeswift.versions import VersionError, versions, with_versions


def clamped(values) -> list[int]:
    return [max(value, 0) for value in values]


def deferred(p: int, m: int) -> Schedule:
    return replace(zb_h1(p, m), flush=False)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_stash_is_the_published_rule(p):
    # w(t+1) = w(t) - lr grad f(w1(t-n+1), ..., wn(t)), n stages counted from 1 (PipeDream, sec. 3.3).
    plan = versions(pipedream(p, 20), "stash")
    for stage in range(p):
        assert plan.forward[stage].tolist() == clamped(range(stage - p + 1, stage - p + 21))
    assert np.array_equal(plan.forward, plan.backward)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_vertical_sync_takes_the_version_of_the_input_stage(p):
    plan = versions(pipedream(p, 20), "vertical")
    for stage in range(p):
        assert plan.forward[stage].tolist() == clamped(range(1 - p, 21 - p))


@pytest.mark.parametrize("make", [pipedream, deferred])
@pytest.mark.parametrize(("p", "every"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_2bw_is_the_published_rule(make, p, every):
    # Micro-batch k, from 1, uses version max(floor((k-1)/m) - 1, 0) (PipeDream-2BW, sec. 3.1).
    plan = versions(make(p, 6 * every), "2bw", every)
    for stage in range(p):
        assert plan.forward[stage].tolist() == [max((k - 1) // every - 1, 0) for k in range(1, 6 * every + 1)]
        assert plan.peak(stage, stage) <= 2


def test_none_uses_two_different_versions():
    plan = versions(pipedream(3, 8), "none")
    assert plan.forward[0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert plan.backward[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_live_versions(p):
    m = 4 * p
    order = pipedream(p, m)
    ranks = range(p)
    assert [versions(order, "stash").peak(rank, rank) for rank in ranks] == [p - rank for rank in ranks]
    assert [versions(order, "vertical").peak(rank, rank) for rank in ranks] == [p] * p
    assert [versions(order, "2bw", p).peak(rank, rank) for rank in ranks] == [2] * p
    assert [versions(deferred(p, m), "stash").peak(rank, rank) for rank in ranks] == [p] * p  # each W waits


def test_staleness_in_updates():
    assert versions(pipedream(4, 16), "stash").staleness[:, -1].tolist() == [3, 2, 1, 0]
    assert versions(pipedream(4, 16), "vertical").staleness[:, -1].tolist() == [3, 3, 3, 3]
    assert versions(pipedream(4, 16), "2bw", 4).staleness[:, -1].tolist() == [1, 1, 1, 1]


def test_an_order_that_flushes_for_every_update_has_no_staleness():
    step = one_f_one_b(3, 4)
    rows = (np.concatenate([order.rows + np.array([0, 0, 4 * k]) for k in range(3)]) for order in step.orders)
    whole = Schedule(tuple(map(Order, rows)), step.routes, (0,) * 12, flush=False)
    plan = versions(whole, "stash", every=4)
    assert not plan.staleness.any()
    assert [plan.peak(rank, rank) for rank in range(3)] == [1, 1, 1]


def test_copies_of_a_stage_number_their_versions_alike():
    order = pipedream(3, 12, (2, 1))
    plan = versions(order, "stash", every=2)
    # Each copy of stage 0 has two micro-batches in flight, one of each of two updates.
    assert plan.forward[0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [plan.peak(rank, 0) for rank in (0, 1)] == [2, 2]


def test_a_simulated_trace_counts_live_versions():
    order = pipedream(3, 8)
    plan = versions(order, "stash")
    counters = with_versions(replay(order, Costs.uniform(3)), order, plan).counters
    assert [(counter.name, counter.rank) for counter in counters] == [
        (f"live versions of stage {stage}", stage) for stage in range(3)
    ]
    assert [counter.value.max() for counter in counters] == [3, 2, 1]
    assert all((np.diff(counter.time) > 0).all() for counter in counters)
    # Stage 0 holds a second version once the backward of micro-batch 0 has ended: after 3 F, 2 B elsewhere, and its B.
    assert (counters[0].time[:2].tolist(), counters[0].value[:2].tolist()) == ([0.0, 9.0], [1, 2])


@pytest.mark.parametrize(
    ("schedule", "policy", "every", "text"),
    [
        (pipedream(2, 8), "stale", 1, r"weights = 'stale' is no weight policy: use one of stash, vertical, 2bw, none"),
        (gpipe(2, 8), "stash", 1, "gpipe|custom flushes: use pipedream, or leave weights out"),
        (pipedream(2, 8), "stash", 3, "updates_every = 3 does not divide the 8 micro-batches of pipedream .* use 2"),
        (pipedream(2, 8), "stash", 0, "updates_every = 0 does not divide"),
        (pipedream(4, 8), "2bw", 2, "updates_every = 2 with 4 ranks. Use 4, or the policy stash"),
        (
            pipedream(3, 8, (2, 1)),
            "stash",
            1,
            "the 2 copies of stage 0 unequal shares of an update: use a multiple of 2",
        ),
        (
            replace(dualpipe(2, 4), flush=False),
            "stash",
            2,
            r"gives rank 0 \d of the 2 micro-batches of an update of stage \d, which 2 ranks hold: let them take",
        ),
    ],
)
def test_what_does_not_fit_is_explained(schedule, policy, every, text):
    with pytest.raises(VersionError, match=text):
        versions(schedule, policy, every)
