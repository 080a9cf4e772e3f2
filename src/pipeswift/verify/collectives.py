"""Whether ranks that share out experts issue their collectives in one order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from pipeswift.program import Work
from pipeswift.verify.violation import InvalidSchedule, Violation


def verify_collectives(orders: Sequence[Sequence[Work]]) -> Iterator[Violation]:
    """Where members of one group would launch different collectives; none is a proof that each launch finds its peers.

    orders[k]: the works on the all-to-all lane of member k, in the order of its launches. A lane runs its works one
    after the other in that order, whatever delays there are, so the orders are all that there is to compare: with
    member 0's, up to the first difference of each.
    """
    first, *others = orders
    for member, order in enumerate(others, start=1):
        pairs = enumerate(zip_longest(first, order))
        number, theirs, mine = next(((i, a, b) for i, (a, b) in pairs if a != b), (0, None, None))
        if theirs != mine:
            text = (
                f"collective {number} of member {member} of an expert group is {mine or 'missing'}, and of member 0 "
                f"{theirs or 'missing'}: all members have to weave on the same costs"
            )
            yield Violation(member, (mine or theirs).action, "collectives", text)  # pyright: ignore[reportOptionalMemberAccess]


def check_collectives(schedule: str, orders: Sequence[Sequence[Work]]) -> None:
    """Raise InvalidSchedule with what `verify_collectives` finds, if anything."""
    if violations := list(verify_collectives(orders)):
        raise InvalidSchedule(schedule, violations)
