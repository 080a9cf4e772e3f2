"""A plan lasts until what it was made for has drifted."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

from pipeswift import schedules
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.passes import split_backward
from pipeswift.policy import Plan, Seen, check_replan
from pipeswift.policy.replan import drift, moved

OWN, OTHER = schedules.build("gpipe", 2, 4), schedules.build("1f1b", 2, 4)
EVEN = {"1.1": np.array([50, 50])}


def seen(*stages: float, loads: dict[str, np.ndarray] | None = None) -> Seen:
    """F, I and W of each stage take so long."""
    return Seen(np.array([stages, stages, stages, [np.nan] * len(stages)]), loads or {})


class Finder:
    """Finds one of `orders` after the other, and keeps what it was asked for."""

    def __init__(self, *orders: Schedule) -> None:
        self._orders = cycle(orders)
        self.asked: list[list[float]] = []

    def __call__(self, seconds: np.ndarray) -> Schedule:
        self.asked.append(seconds[0].tolist())
        return next(self._orders)


def run(*steps: Seen) -> list[list[float]]:
    """For which F of the stages plans were made, in so many steps, if each comes to another order."""
    plan, finder = Plan(OWN), Finder(OTHER, OWN)
    for step in steps:
        plan = plan.after(step, finder)
    assert plan.made == len(finder.asked)
    return finder.asked


def test_plans_that_come_to_the_same_order_come_less_and_less_often():
    plan, finder, made = Plan(OWN), Finder(OTHER), []
    for step in range(64):
        plan = plan.after(seen(1, 2.0**step), finder)
        assert plan.order is OTHER
        made.append(plan.made)
    assert [made.index(number) for number in range(1, 8)] == [0, 1, 3, 6, 11, 20, 37]


def test_the_first_step_gives_the_first_plan_and_steady_times_no_other():
    assert run(seen(1, 1), *[seen(1.04, 0.98)] * 10) == [[1, 1]]


def test_a_plan_is_for_the_mean_of_three_steps():
    assert run(seen(1, 1), seen(1, 1), seen(1, 4), seen(1, 4), seen(1, 4), seen(1, 4)) == [
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
    ]


def test_slow_drift_adds_up():
    steps = [seen(1, 1.01**step) for step in range(20)]
    assert len(run(*steps)) == 4


def test_rows_that_move_to_other_experts_make_earlier_times_worthless():
    steps = [seen(1, 1, loads=EVEN)] * 3 + [seen(1, 3, loads={"1.1": np.array([60, 40])})]
    assert run(*steps) == [[1, 1], [1, 3]]


def test_drift_is_the_largest_change_of_a_stage_or_of_a_load():
    assert drift(seen(1, 1), seen(1, 1)) == 0
    assert drift(seen(1, 1.2), seen(1, 1)) == pytest.approx(0.2)
    assert drift(seen(0.5, 1.2), seen(1, 1)) == pytest.approx(0.5)
    assert drift(seen(0, 1), seen(0, 1)) == 0
    assert drift(seen(1, 1, loads={"1.1": np.array([20, 80])}), seen(1, 1, loads=EVEN)) == pytest.approx(0.3)


def test_more_rows_in_the_same_shares_have_not_moved():
    assert moved({"1.1": np.array([10, 30])}, {"1.1": np.array([1, 3])}) == 0
    assert moved({"1.1": np.array([0, 0])}, {"1.1": np.array([0, 0])}) == 0
    assert moved({"1.1": np.array([0, 3]), "2.1": np.array([1, 1])}, {"1.1": np.array([3, 0])}) == 1


def uneven() -> Schedule:
    whole = schedules.build("1f1b", 3, 2)
    return Schedule(whole.orders[:2], ((0, 0, 1),), whole.route_of, name="uneven")


def mixed() -> Schedule:
    whole = schedules.build("1f1b", 2, 2)
    return Schedule((whole.orders[0], split_backward(whole).orders[1]), whole.routes, whole.route_of, name="mixed")


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (schedules.build("pipedream", 2, 4), "policy replan needs a schedule that flushes: pipedream"),
        (schedules.build("dualpipe", 2, 4), "policy replan needs a schedule with one route: dualpipe has 2"),
        (schedules.build("1f1b-overlap", 2, 4), "policy replan cannot part woven pairs: 1f1b-overlap has Overlaps"),
        (uneven(), "policy replan needs as many stages on every rank: uneven has 2 1 by rank"),
        (mixed(), "policy replan keeps backwards whole or split, and mixed has both"),
    ],
    ids=lambda case: getattr(case, "name", ""),
)
def test_what_cannot_be_replanned_is_refused(schedule, message):
    with pytest.raises(PipeSwiftError, match=message):
        check_replan(schedule)


def test_a_limit_below_what_the_schedule_holds_is_refused():
    check_replan(schedules.build("1f1b", 4, 8), in_flight=4)
    with pytest.raises(PipeSwiftError, match=r"in_flight = 3 is less than the 4 micro-batches .* order of 1f1b"):
        check_replan(schedules.build("1f1b", 4, 8), in_flight=3)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_schedules_with_one_route_and_a_flush_can_be_replanned(name):
    check_replan(schedules.build(name, 2, 4))
