"""One clock, two ways to turn it: a replay and an event loop that follows give the same times, to the last bit."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift.cost import Costs
from pipeswift.ir import Op, Order, Overlap, Schedule
from pipeswift.passes import split_backward
from pipeswift.schedules import build
from pipeswift.simulate import Deadlock, replay, run
from pipeswift.trace import COLUMNS
from tests.simulate.written import written

WRITTEN = [
    # Two opposite routes, each stage on two ranks.
    written(
        "0F0 1F1 0F2 1B1 1F3 0B0 1B3 0B2",
        "0F1 1F0 0F3 1B0 1F2 0B1 1B2 0B3",
        routes=((0, 1), (1, 0)),
    ),
    # V placement: the turn stays on the last rank; W where there is time.
    written(
        "0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 0W0 3W1 0W1",
        "1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1W0 2W1 1W1",
        routes=((0, 1, 1, 0),),
    ),
    # A stage that takes turns on two ranks.
    written(
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
        routes=((0, 2), (1, 2)),
    ),
    # Ranks that wait for each other.
    written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
]


def delay_weights(schedule: Schedule, by: int) -> Schedule:
    """Every B split, with W up to `by` entries later."""

    def moved(order: Order) -> Order:
        entries = list(order.actions())
        place = {entry: i + (by if entry.op is Op.W else 0) for i, entry in enumerate(entries)}
        return Order.of(sorted(entries, key=place.__getitem__))

    return replace(schedule, orders=tuple(map(moved, split_backward(schedule).orders)))


def weave(schedule: Schedule) -> Schedule:
    """Every F woven into the B that follows it."""

    def woven(order: Order):
        actions = list(order.actions())
        while actions:
            action = actions.pop(0)
            woven = actions and (action.op, actions[0].op) == (Op.F, Op.B)
            yield Overlap(action, actions.pop(0)) if woven else action

    return replace(schedule, orders=tuple(Order.of(woven(order)) for order in schedule.orders))


@st.composite
def schedules(draw) -> Schedule:
    p, m, v = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 2))
    generated = {
        "naive": lambda: build("naive", p, m),
        "gpipe": lambda: build("gpipe", p, m),
        "1f1b": lambda: build("1f1b", p, m),
        "interleaved-1f1b": lambda: build("interleaved-1f1b", p, p * min(m, 3), chunks=v),
    }
    schedule = draw(st.sampled_from([*generated, *WRITTEN]))
    if isinstance(schedule, Schedule):
        return schedule
    change = draw(st.sampled_from([lambda same: same, split_backward, lambda same: delay_weights(same, 3), weave]))
    return change(generated[schedule]())


@st.composite
def costs_for(draw, schedule: Schedule) -> Costs:
    p, stages = schedule.num_ranks, schedule.num_stages
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    times = draw(st.sampled_from([numbers.random, lambda shape: numbers.integers(0, 3, shape).astype(float)]))
    return replace(
        Costs.uniform(stages),
        seconds=times((4, stages, draw(st.sampled_from([1, schedule.num_microbatches])))),
        boundary_bytes=times(stages - 1),
        latency=draw(st.sampled_from([0.0, 0.3, times((p, p))])),
        bandwidth=draw(st.sampled_from([float("inf"), 0.7])),
        serial_channels=draw(st.booleans()),
        overlap=draw(st.sampled_from([None, 1.3, np.where(numbers.random((stages, stages)) < 0.3, np.nan, 1.3)])),
    )


def outcome(simulate, schedule: Schedule, costs: Costs):
    try:
        trace = simulate(schedule, costs)
    except Deadlock as deadlock:
        return sorted({stuck.rank for stuck in deadlock.stuck})
    return {column: getattr(trace, column).tolist() for column in COLUMNS}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_replay_and_following_event_loop_agree_bit_for_bit(data):
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule))
    assert outcome(replay, schedule, costs) == outcome(run, schedule, costs)


def test_forwards_alone_agree_too():
    schedule = written("0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1")
    costs = Costs.uniform(4, comm=0.25)
    assert outcome(replay, schedule, costs) == outcome(run, schedule, costs)
