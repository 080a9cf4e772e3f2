from itertools import permutations

import pytest
from hypothesis import given

from pipeswift.ir import F, Op
from pipeswift.program import Lane, merge
from pipeswift.verify import InvalidSchedule, check_collectives, verify_collectives
from tests.program.programs import costs, one_block, programs, quick


def collectives(program):
    return list(program.on(Lane.ALL_TO_ALL))


@quick
@given(programs((Op.F,), stage=1), programs((Op.I, Op.B)), costs())
def test_members_that_weave_on_the_same_costs_issue_one_order(forward, backward, seconds):
    members = [collectives(merge(forward, backward, seconds)) for _ in range(3)]
    assert not list(verify_collectives(members))


def test_every_other_order_is_found_and_named():
    counts, dispatch, combine = order = collectives(one_block(Op.F))
    for other in permutations(order):
        found = list(verify_collectives([order, other]))
        assert bool(found) == (list(other) != order)
    (violation,) = verify_collectives([order, order, [counts, combine, dispatch]])
    assert (violation.rank, violation.action) == (2, F(0, 0))
    assert violation.sentence.startswith(
        "collective 1 of member 2 of an expert group is 0F0 combine, and of member 0 0F0 dispatch"
    )


def test_a_missing_collective_is_found():
    order = collectives(one_block(Op.F))
    with pytest.raises(
        InvalidSchedule, match=r"collective 2 of member 1 of an expert group is missing, and of member 0"
    ):
        check_collectives("1f1b-overlap", [order, order[:2]])
