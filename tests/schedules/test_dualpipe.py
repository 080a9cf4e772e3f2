from dataclasses import replace

import pytest

from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.passes import transfers
from pipeswift.schedules import ScheduleError, Times, build, dualpipe, entry
from pipeswift.simulate import replay, run
from pipeswift.trace import busy_per_rank, makespan
from pipeswift.verify import peak_activations, verify
from tests.schedules.figure import draw, figure_of

SHAPES = [(2, 4), (2, 10), (4, 8), (4, 14), (6, 12), (8, 20)]


def test_dualpipe_is_the_figure():
    assert draw(dualpipe(4, 8)) == figure_of(dualpipe.__doc__)


@pytest.mark.parametrize("receive_pool", [1, 2])
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_every_shape_is_valid_within_the_memory_it_claims(p, m, receive_pool):
    assert verify(dualpipe(p, m), receive_pool=receive_pool, memory_limit=p + 1) == []


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_every_rank_holds_one_activation_more_than_there_are_ranks(p, m):
    """Case 18.4: the first rank's own end gives p, and one more is under way while a pair is woven."""
    assert peak_activations(dualpipe(p, m)).tolist() == [p + 1] * p


def test_every_stage_is_on_two_ranks():
    schedule = dualpipe(4, 8)
    assert schedule.routes == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert schedule.route_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert schedule.parameters == 2
    assert {abs(t.source - t.destination) for t in transfers(schedule)} == {1}


@pytest.mark.parametrize(("pair", "seconds", "idle"), [(3, 66, (6, 6)), (2, 52, (1, 3))])
def test_published_figures(pair, seconds, idle):
    """DeepSeek-AI 2024, table 2 with p = 8, m = 20, F = I = W = 1: (p/2-1)(F&B+B-3W) is 6 and 3."""
    schedule = dualpipe(8, 20)
    costs = replace(Costs.uniform(8), overlap=pair)
    trace = replay(schedule, costs)
    assert makespan(trace) == seconds
    resting = makespan(trace) - busy_per_rank(trace)
    assert (resting.min(), resting.max()) == idle
    assert max(idle) == (8 / 2 - 1) * (pair + 2 - 3)
    assert makespan(run(schedule, costs)) == seconds


def test_the_formulas_say_b_for_two_things():
    """Case 18.2: with B = I + W throughout, F = I = W = 1 and p = 8."""
    ones = Times(1, 1, 1)
    idle = {name: entry(name).bubble.of(8, 20, 1, ones) for name in ("1f1b", "zb-h1", "dualpipe")}
    assert idle == {"1f1b": 21, "zb-h1": 7, "dualpipe": 6}


@pytest.mark.parametrize(
    ("name", "chunks", "share"),
    [("1f1b", 1, 0.35), ("interleaved-1f1b", 2, 0.175), ("dualpipe", 1, 0.1), ("interleaved-1f1b", 4, 0.0875)],
)
def test_is_it_better_than_interleaving(name, chunks, share):
    """Case 18.5: idle time over work for p = 8, m = 20; interleaving by its formula, since 20 is no multiple of 8."""
    bubble = entry(name).bubble
    assert bubble is not None
    assert bubble.of(8, 20, chunks, Times(1, 1, 1)) / (20 * 3) == pytest.approx(share)


def test_weight_gradients_add_up_in_micro_batch_order():
    """So that a copy's sum over its own micro-batches has the bits of a plain loop over them."""
    for order in dualpipe(4, 10).orders:
        for stage in {action.stage for action in order.actions()}:
            made = [a.microbatch for a in order.actions() if a.stage == stage and a.op in (Op.B, Op.W)]
            assert made == sorted(made)


@pytest.mark.parametrize(
    ("p", "m", "text"),
    [
        (3, 8, "dualpipe needs an even number of ranks: got --pp 3. Use 2 or 4"),
        (4, 9, "dualpipe needs an even number of micro-batches: got --microbatches 9 with --pp 4. Use 8 or 10"),
        (4, 6, "at least twice as many micro-batches as --pp: got --microbatches 6 with --pp 4. Use 8 or 9"),
    ],
)
def test_what_it_asks_for(p, m, text):
    with pytest.raises(ScheduleError, match=text):
        build("dualpipe", p, m)
