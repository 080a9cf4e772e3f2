import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswift.cost import Costs
from pipeswift.ir import loop, vee
from pipeswift.search.bound import lower_bound
from pipeswift.search.candidates import one_at_a_time
from pipeswift.search.exact import solve
from pipeswift.search.packed import keeps_limit, pack, unpack, value
from pipeswift.search.problem import Problem
from tests.search.problems import TABLE5, problem


@pytest.mark.parametrize(
    ("limit", "objective", "bound"),
    [
        # 12 (F + I + W) = 348; warm-up: a round trip of 69 less 3 F; drain: another, less 3 (I + W).
        (4, "span", 348 + 39 + 12),
        (4, "makespan", 348 + 39 + 12),
        # The way to the last rank, its F and I, the way back, and a W.
        (8, "span", 3 * 11 + 12 * 21 + 3 * 12 + 8 + 4 * 8),
        # The way to the last rank, and its work.
        (8, "makespan", 33 + 348),
        (float("inf"), "makespan", 33 + 348),
        (float("inf"), "span", 348),
    ],
)
def test_by_hand(limit, objective, bound):
    assert lower_bound(problem(4, 12, (10, 11, 8, 1), limit=limit, objective=objective)) == bound


@pytest.mark.parametrize("row", TABLE5, ids=lambda row: f"{row.model}-m{row.m}")
def test_zb_1p_cannot_be_beaten(row):
    """Qi et al. 2024, table 5: the published rates at 8 micro-batches' memory are the bound, to their four digits."""
    bytes_ = problem(8, row.m, row[2:6], memory=row.memory, limit=8 * row.memory[0])
    assert round(1 - bytes_.work.max() / lower_bound(bytes_), 4) == row.zb_1p


@st.composite
def problems(draw) -> Problem:
    p, chunks = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
    m = draw(st.integers(1, 4 if chunks == 1 else 3))
    stages = p * chunks
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    seconds = random.integers(1, 9, (4, stages, draw(st.sampled_from([1, m])))).astype(float)
    held = random.integers(1, 6, stages).astype(float)
    freed = np.floor(held * random.random(stages))
    if draw(st.booleans()):
        freed = -random.integers(0, 2, stages).astype(float)
    costs = Costs(
        seconds=seconds,
        memory=np.stack([held, -freed, freed - held, -held]),
        boundary_bytes=np.zeros(stages - 1),
        latency=random.integers(0, 4, (p, p)).astype(float),
    )
    placement = draw(st.sampled_from([loop, vee]))
    objective = draw(st.sampled_from(["span", "makespan"]))
    free = Problem(costs, p, m, chunks, placement, float("inf"), objective)
    least = max(free.least_memory(rank) for rank in range(p))
    return Problem(costs, p, m, chunks, placement, draw(st.sampled_from([1, 1.5, 2, 3, 9])) * least, objective)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_no_bound_is_above_the_optimum_and_the_solvers_is_on_it(given):
    start = unpack(given, pack(one_at_a_time(given)))
    answer = solve(given, start, 0.0, seconds=60)
    assert answer.schedule is not None
    assert keeps_limit(given, answer.schedule)
    assert value(given, answer.schedule) == pytest.approx(answer.bound)
    assert lower_bound(given) <= answer.bound + 1e-9
