import signal
from dataclasses import replace

import numpy as np
import pytest

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import loop, vee
from pipeswift.search import Found, Infeasible, SearchError, search
from pipeswift.search.packed import keeps_limit, value
from pipeswift.search.problem import Problem
from pipeswift.simulate import replay
from pipeswift.trace import bubble_rate, longest_span, peak_memory
from pipeswift.verify import verify
from tests.search.problems import TABLE5, Row, problem

HEAVY_END = replace(Costs.uniform(8, F=11.3, I=11.25, W=8.1, comm=0.378))
HEAVY_END = replace(HEAVY_END, seconds=HEAVY_END.seconds * np.where(np.arange(8) == 7, 1.4, 1.0)[:, None])


def solve(given: Problem, *, work_limit: int | None = 12_000, watch=None) -> Found:
    """A search that takes the same steps on every machine, and what always holds of its result."""
    found = search(
        given.costs,
        ranks=given.ranks,
        microbatches=given.microbatches,
        chunks=given.chunks,
        placement=given.placement,
        memory_limit=given.limit,
        objective=given.objective,
        variability=given.variability,
        time_limit=60,
        work_limit=work_limit,
        workers=1,
        watch=watch,
    )
    assert verify(found.schedule) == []
    peaks = peak_memory(replay(found.schedule, given.costs), given.costs.memory)
    assert (peaks <= given.limit * (1 + 1e-9)).all()
    assert found.value == value(given, found.schedule) >= found.lower_bound
    assert found.gap == pytest.approx((found.value - found.lower_bound) / found.value, abs=1e-9)
    return found


@pytest.mark.parametrize(
    ("p", "m", "times", "limit", "span"),
    [
        (4, 12, (5, 6, 4, 0), 10, 193),
        (4, 12, (5478, 5806, 3534, 200), 32, 178898),
        (32, 16, (1, 1, 1, 0), 64, 95),
    ],
)
def test_the_spans_of_the_papers_own_search_are_reached(p, m, times, limit, span):
    assert solve(problem(p, m, times, memory=(2, -1, -1), limit=limit)).value <= span


def rate(row: Row, limit: int) -> float:
    held = row.memory[0]
    given = problem(8, row.m, row[2:6], memory=row.memory, limit=limit * held)
    return bubble_rate(replay(solve(given).schedule, given.costs), by="span")


@pytest.mark.parametrize("row", TABLE5, ids=lambda row: f"{row.model}-m{row.m}")
class TestZeroBubbleTable5:
    """Qi et al. 2024, tables 5 and 9: memory limits of 8 and of 16 micro-batches, in bytes."""

    def test_1p(self, row):
        assert round(rate(row, 8), 4) <= row.zb_1p

    def test_2p(self, row):
        assert round(rate(row, 16), 4) <= row.zb_2p


@pytest.mark.parametrize("objective", ["span", "makespan"])
@pytest.mark.parametrize(("p", "m"), [(4, 12), (8, 16)])
@pytest.mark.parametrize("share", [1, 2])
def test_the_optimum_is_proved_at_the_memory_of_one_and_of_two_round_trips(p, m, share, objective):
    found = solve(problem(p, m, (10, 11, 8, 1), limit=share * p, objective=objective))
    assert found.optimal
    assert found.gap == 0
    # The makespans are those that an independent solver found.
    if objective == "makespan":
        assert found.value == {(4, 1): 399, (4, 2): 381, (8, 1): 583, (8, 2): 541}[p, share]


@pytest.mark.parametrize(("p", "m"), [(16, 128), (32, 256)])
def test_large_ones_in_counts_are_no_worse_than_zb_h1(p, m):
    given = problem(p, m, (11.3, 11.25, 8.1, 0.378), limit=p)
    assert solve(given).value <= longest_span(replay(schedules.build("zb-h1", p, m), given.costs))


@pytest.mark.parametrize(("p", "m"), [(16, 128), (32, 256)])
def test_large_ones_in_bytes_have_almost_no_bubble(p, m):
    held, kept = 378880, 163840
    given = problem(p, m, (11.3, 11.25, 8.1, 0.378), memory=(held, kept - held, -kept), limit=2 * p * held)
    found = solve(given, work_limit=400)
    assert bubble_rate(replay(found.schedule, given.costs), by="span") < 0.004


@pytest.mark.parametrize("limit", [8, 16])
def test_a_heavy_last_stage(limit):
    given = Problem(HEAVY_END, 8, 32, 1, loop, limit, "span")
    found = solve(given)
    assert found.gap < 0.01
    for entry in schedules.entries():
        published = schedules.build(entry.name, 8, 32)
        if published.routes == found.schedule.routes:
            assert not keeps_limit(given, published) or found.value <= value(given, published)


@pytest.mark.parametrize(("placement", "chunks"), [(loop, 2), (vee, 2), (vee, 3)])
@pytest.mark.parametrize("limit", [1, 3, 6])
def test_chunks(placement, chunks, limit):
    given = problem(3, 7, (5, 6, 4, 0.5), memory=None, limit=limit, chunks=chunks, placement=placement)
    found = solve(given, work_limit=1000)
    for entry in schedules.entries():
        if entry.chunks == chunks and not entry.rules:
            published = schedules.build(entry.name, 3, 7, chunks)
            fits = published.routes == found.schedule.routes and keeps_limit(given, published)
            assert not fits or found.value <= value(given, published)


def test_zb_v_is_found_where_it_is_the_best():
    found = solve(problem(4, 8, (1, 1, 1, 0), memory=None, limit=4, chunks=2, placement=vee))
    assert (found.value, found.method, found.optimal) == (24, "zb-v", True)


def test_the_solver_proves_what_no_formula_does():
    given = problem(3, 6, (5478, 5806, 3534, 200), memory=(2, -1, -1), limit=12)
    found = solve(given, work_limit=None)
    assert found.optimal
    assert found.lower_bound > given.work.max()


def test_measured_seconds_that_differ_by_micro_batch_and_links_that_differ_by_pair():
    random = np.random.default_rng(1)
    seconds = random.uniform(1, 2, (4, 3, 5))
    costs = replace(Costs.uniform(3), seconds=seconds, latency=random.uniform(0, 1, (3, 3)))
    solve(Problem(costs, 3, 5, 1, loop, 3, "makespan"))


def test_under_variability_the_mean_counts():
    nominal = problem(4, 12, (10, 11, 8, 1), limit=6)
    varied = replace(nominal, variability=0.4)
    blind, seeing = solve(nominal), solve(varied, work_limit=3000)
    assert not seeing.optimal
    assert seeing.value < value(varied, blind.schedule)


def test_a_work_limit_gives_the_same_answer_every_time():
    given = problem(4, 9, (5.1, 6.2, 4.3, 0.4), limit=5.0)
    one, other = solve(given, work_limit=500), solve(given, work_limit=500)
    assert one.schedule.fingerprint == other.schedule.fingerprint
    assert (one.value, one.lower_bound, one.method) == (other.value, other.lower_bound, other.method)


def test_one_micro_batch_and_one_rank():
    assert solve(problem(1, 1, (1, 2, 3, 5))).value == 6
    assert solve(problem(3, 1, (1, 2, 3, 5))).value == 3 * 3 + 4 * 5 + 3


def test_an_interrupt_returns_the_best_so_far():
    given = problem(8, 32, TABLE5[1][2:6], memory=TABLE5[1].memory, limit=16 * TABLE5[1].memory[0])
    seen = []

    def watch(progress):
        seen.append(progress)
        if len(seen) == 1:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    found = search(given.costs, ranks=8, microbatches=32, memory_limit=given.limit, time_limit=3600, watch=watch)
    assert signal.getsignal(signal.SIGINT) is handler
    assert found.value == seen[-1].value
    assert found.seconds < 60
    assert not found.optimal


def test_a_second_interrupt_ends_it():
    def press_twice(progress):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        search(Costs.uniform(2), ranks=2, microbatches=4, watch=press_twice)


def test_an_answer_that_is_the_same_everywhere_is_whole_or_none():
    # Otherwise one rank of a run that plans would go on with an order of its own, and its Ctrl-C would be lost.
    with pytest.raises(KeyboardInterrupt):
        search(
            Costs.uniform(2),
            ranks=2,
            microbatches=4,
            work_limit=50,
            watch=lambda _: signal.raise_signal(signal.SIGINT),
        )


def test_progress_only_ever_gets_better():
    seen = []
    given = problem(8, 32, TABLE5[1][2:6], memory=TABLE5[1].memory, limit=16 * TABLE5[1].memory[0])
    found = solve(given, work_limit=1000, watch=seen.append)
    values = [progress.value for progress in seen]
    assert values == sorted(values, reverse=True)
    assert values[-1] == found.value


def test_a_limit_below_one_micro_batch_is_refused():
    costs = Costs.uniform(3)
    costs = replace(costs, memory=costs.memory * [1, 3, 2])
    with pytest.raises(Infeasible, match=r"limit 2 is too low: rank 1 needs 3 for a single micro-batch. Use 3 or more"):
        search(costs, ranks=3, microbatches=4, memory_limit=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1: got 0"),
        ({"microbatches": 0}, "microbatches must be at least 1: got 0"),
        ({"ranks": 4}, "costs are for 3 stages, but 4 ranks with 1 chunks make 4"),
        ({"objective": "speed"}, "objective must be span or makespan: got 'speed'"),
        ({"time_limit": 0}, "time_limit must be above 0: got 0"),
        ({"work_limit": 0}, "work_limit must be above 0: got 0"),
        ({"variability": -1}, "variability must be from 0 to 3: got -1"),
        ({"memory_limit": float("nan")}, "memory limit nan is too low"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(SearchError, match=message):
        search(**({"costs": Costs.uniform(3), "ranks": 3, "microbatches": 4} | settings))


def test_memory_has_to_come_back():
    costs = Costs.uniform(3).with_memory(2, -1, -0.5)
    with pytest.raises(SearchError, match=r"must sum to 0.*got 2,-1,-0.5. Use 2,-1,-1"):
        search(costs, ranks=3, microbatches=4)


def test_costs_that_are_not_understood():
    costs = Costs.uniform(3)
    with pytest.raises(SearchError, match="serial_channels"):
        search(replace(costs, serial_channels=True), ranks=3, microbatches=4)
    with pytest.raises(SearchError, match="lacks numbers"):
        search(replace(costs, seconds=costs.seconds * np.nan), ranks=3, microbatches=4)
