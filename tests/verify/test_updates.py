from dataclasses import replace
from math import lcm

import pytest

from pipeswift.ir import B, F, Order, Overlap
from pipeswift.schedules import pipedream
from pipeswift.verify import InvalidSchedule, check_versions, verify, verify_versions
from pipeswift.versions import WEIGHT_POLICIES, versions
from tests.schedules.test_pipedream import REPLICAS
from tests.simulate.written import written


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("policy", WEIGHT_POLICIES)
def test_every_policy_fits_pipedream(replicas, policy):
    ranks, turns = sum(replicas), lcm(*replicas)
    order = pipedream(ranks, 4 * ranks * turns, replicas)
    every = ranks * turns if policy == "2bw" else turns
    assert verify_versions(order, versions(order, policy, every)) == []


def test_a_version_that_is_not_there_yet():
    # Without 1F1B's limit on what is in flight, the second update's forwards run before the first update is done.
    order = replace(written("0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5"), flush=False)
    found = verify_versions(order, versions(order, "2bw", 2))
    assert [str(violation) for violation in found] == [
        "versions: 0F4 uses version 1 of its weights, and 0 is the newest when it starts"
    ]


def test_limits_on_versions_and_staleness():
    order = pipedream(3, 9)
    plan = versions(order, "stash")
    assert verify_versions(order, plan, version_limit=3, staleness_limit=2) == []
    assert [str(found) for found in verify_versions(order, plan, version_limit=2)] == [
        "versions: rank 0 keeps 3 versions of stage 0, and the limit is 2"
    ]
    assert [str(found) for found in verify_versions(order, plan, staleness_limit=1)] == [
        "versions: 0F2 uses weights that are 2 updates old when its gradient is applied, and the limit is 1"
    ]
    with pytest.raises(InvalidSchedule, match="pipedream with weights stash cannot run"):
        check_versions(order, plan, version_limit=1)


def test_copies_that_wait_for_ever_to_sum_their_gradients():
    # Rank 0 ends its share of update 0 and sums; rank 1 ends its own only after 0B3, which needs rank 0's 0F2 first.
    rows = "0F0 0B0 0F2 0B2", "0F1 0F3 0B1 0B3", "1F0 1B0 1F2 1F1 1B1 1F3 1B2 1B3"
    order = replace(written(*rows, routes=((0, 2), (1, 2))), flush=False)
    assert verify(order) == []
    (found,) = verify_versions(order, versions(order, "stash", 2))
    assert found.kind == "deadlock"
    assert "the sum of update 0 over the ranks of stage 0" in found.sentence
    assert verify_versions(order, versions(order, "stash", 4)) == []


def test_parts_of_an_overlap_wait_one_after_the_other():
    # Rank 0 sums update 0 when the first part has ended; the second makes what rank 1 needs before it gets there.
    rows = "0F0 0F2 0B0 0B2", "0F1 0F3 0B1 0B3", "1F0 1B0 1F2 1F1 1B1 1F3 1B2 1B3"
    alone = replace(written(*rows, routes=((0, 2), (1, 2))), flush=False)
    for pair, circles in ((Overlap(B(0, 0), F(0, 2)), 1), (Overlap(F(0, 2), B(0, 0)), 0)):
        woven = replace(alone, orders=(Order.of([F(0, 0), pair, B(0, 2)]), *alone.orders[1:]))
        assert verify(woven) == []
        assert len(verify_versions(woven, versions(woven, "stash", 2))) == circles


def test_backwards_of_two_routes_that_change_places():
    rows = "0F0 0F2 0B0 0B2", "0F1 0F3 0B1 0B3", "1F0 1F1 1F2 1B0 1B2 1B1 1F3 1B3"
    order = replace(written(*rows, routes=((0, 2), (1, 2))), flush=False)
    assert verify(order) == []
    assert [str(found) for found in verify_versions(order, versions(order, "stash", 2))] == [
        "versions: 1B1 comes after the backward of a later micro-batch, whose update would miss it"
    ]
