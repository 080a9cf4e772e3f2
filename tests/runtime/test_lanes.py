import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, get_ident

import pytest

from pipeswift.ir import B, F, Op
from pipeswift.program import Form, Lane, Part, Program, Work, chunk, compile_action, merge
from pipeswift.runtime.lanes import Lanes
from pipeswift.verify import verify_collectives
from tests.program.programs import one_block


@pytest.fixture
def lanes():
    made = Lanes()
    yield made
    made.close()


def test_a_launch_runs_on_its_lanes_thread(lanes):
    threads = {lane: lanes.launch(lane, get_ident).wait() for lane in (Lane.ALL_TO_ALL, Lane.POINT_TO_POINT)}
    assert len({get_ident(), *threads.values()}) == 3
    assert lanes.launch(Lane.ALL_TO_ALL, get_ident).wait() == threads[Lane.ALL_TO_ALL]


def test_launches_of_a_lane_run_in_order_while_the_host_goes_on(lanes):
    host_went_on, ran = Event(), []
    first = lanes.launch(Lane.ALL_TO_ALL, lambda: (host_went_on.wait(), ran.append("first")))
    second = lanes.launch(Lane.ALL_TO_ALL, lambda: ran.append("second"))
    assert not ran
    host_went_on.set()
    second.wait()
    assert ran == ["first", "second"]
    assert first.start <= first.end <= second.start <= second.end


def test_an_error_shows_where_the_launch_is_waited_for_and_ends_its_lane(lanes):
    def fail():
        raise OSError("the link is down")

    launched = [lanes.launch(Lane.ALL_TO_ALL, call) for call in (fail, lambda: 1)]
    for launch in launched:
        with pytest.raises(OSError, match="the link is down"):
            launch.wait()
    assert lanes.launch(Lane.POINT_TO_POINT, lambda: 1).wait() == 1


@pytest.mark.parametrize("op", [Op.F, Op.I, Op.B])
def test_a_program_runs_each_work_once_in_an_order_it_allows(lanes, op):
    program = chunk(one_block(op), 3, local_first=True)
    ran = []
    timeline = lanes.run(program, {work: lambda work=work: ran.append(work) for work in program.works})
    assert sorted(map(str, ran)) == sorted(map(str, program.works))
    assert [w for w in ran if w.lane is Lane.ALL_TO_ALL] == list(program.on(Lane.ALL_TO_ALL))
    spans = {span.work: span for span in timeline.spans}
    for work, needs in program.after.items():
        assert all(spans[before].end <= spans[work].start for before in needs)


def test_the_host_says_what_it_waits_for(lanes):
    program, seen = one_block(Op.F), []
    calls = dict.fromkeys(program.works, lambda: None)
    dispatch = next(work for work in program.works if work.part is Part.DISPATCH)

    def watch():
        while lanes.waits_for != dispatch:
            pass
        seen.append(lanes.waits_for)

    lanes.run(program, calls | {dispatch: watch})
    assert seen == [dispatch]
    assert lanes.waits_for is None


def pairs(seed: int) -> list[Program]:
    """Three woven pairs; chunks and costs are drawn, the same for every rank that has this seed."""
    draw = random.Random(seed)
    made = []
    for _ in range(3):
        actions, layout = (F(1, 4), B(0, 1)), (draw.choice((Form.MOE, Form.MOE_SHARED)),) * draw.randint(1, 2)
        apart = [compile_action(action, layout=layout, takes=True, sends=True) for action in actions]
        first, second = (chunk(program, draw.randint(1, 3), local_first=True) for program in apart)
        costs = {work: draw.random() for work in (*first.works, *second.works)}
        made.append(merge(first, second, costs.__getitem__))
    return made


def issued(seed: int, delays: random.Random, meet: Callable[[], object]) -> list[Work]:
    """The collectives of one rank in the order in which its lane runs them, when every work may be late."""
    order: list[Work] = []

    def run(work: Work) -> None:
        if delays.random() < 0.3:
            time.sleep(delays.random() * 2e-4)
        if work.lane is Lane.ALL_TO_ALL:
            order.append(work)
            meet()

    lanes = Lanes()
    for program in pairs(seed):
        lanes.run(program, {work: lambda work=work: run(work) for work in program.works})
    lanes.close()
    return order


@pytest.mark.parametrize("patterns", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_pattern_of_delays_makes_two_ranks_issue_collectives_in_different_orders(patterns):
    """A collective waits for its peer, so a rank can be held up by the other, too."""
    with ThreadPoolExecutor(2) as ranks:
        for seed in range(patterns):
            meet, delays = Barrier(2, timeout=30), [random.Random(2 * seed + rank) for rank in range(2)]
            orders = list(ranks.map(lambda mine: issued(seed, mine, meet.wait), delays))  # noqa: B023
            assert len(orders[0]) >= 3 * 5
            assert not list(verify_collectives(orders))
