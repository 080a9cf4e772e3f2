import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift.ir import Action, Op
from pipeswift.program import LOCAL, BlockCosts, Line, Link, Part, Work, chunk, link_of
from tests.program.programs import one_block, quick

NEAR, FAR = Link(latency=1e-6, bandwidth=8e9), Link(latency=1e-4, bandwidth=1e9)
COSTS = BlockCosts(
    exchange=Line(0.1, 1e-3),
    sent=1000,
    counts=8,
    experts={Op.F: Line(0.01, 1.0), Op.I: Line(0.02, 1.2), Op.W: Line(0.03, 0.8)},
    others={(Part.ATTENTION, Op.F): 0.5},
)


def work(part, op=Op.F, **more):
    return Work(Action(0, op, 0), part, 0, op, **more)


def test_a_chunk_takes_its_share_and_the_whole_latency():
    assert COSTS(work(Part.DISPATCH)) == pytest.approx(0.1 + 1.0)
    assert COSTS(work(Part.DISPATCH, chunks=4)) == pytest.approx(0.1 + 0.25)
    assert COSTS(work(Part.EXPERTS, Op.I, chunks=4)) == pytest.approx(0.02 + 0.3)
    assert COSTS(work(Part.COUNTS)) == pytest.approx(0.108)
    assert COSTS(work(Part.ATTENTION)) == 0.5
    assert COSTS(work(Part.MERGE)) == 0.0


@quick
@given(st.floats(0, 1), st.integers(1, 8), st.sampled_from((Op.F, Op.B)))
def test_chunks_compute_all_tokens_between_them(local, chunks, op):
    costs = BlockCosts(
        COSTS.exchange, COSTS.sent, {op: Line(0.0, line.each) for op, line in COSTS.experts.items()}, local
    )
    program = chunk(one_block(op), chunks, local_first=local > 0)
    total = sum(costs(work) for work in program.works if work.part is Part.EXPERTS)
    assert total == pytest.approx(1.0 if op is Op.F else 2.0)


def test_local_tokens_are_computed_apart():
    costs = BlockCosts(COSTS.exchange, COSTS.sent, {Op.F: Line(0.0, 1.0), Op.W: Line(0.0, 1.0)}, local=0.5)
    assert costs(work(Part.EXPERTS, chunk=LOCAL, chunks=2)) == 0.5
    assert costs(work(Part.EXPERTS, chunk=0, chunks=2)) == 0.25
    assert costs(work(Part.EXPERTS, Op.W, chunk=0, chunks=2)) == 0.5


@pytest.mark.parametrize(
    ("hosts", "link"),
    [
        ("aaaa", NEAR),
        ("abcd", FAR),
        ("a", NEAR),
        ("aabb", Link(1e-4, 1.5e9)),  # two thirds of the bytes leave the host
        ("aaab", FAR),  # all that the last rank sends leaves its host
    ],
)
def test_where_ranks_sit_decides_on_the_link(hosts, link):
    assert link_of(hosts, NEAR, FAR) == pytest.approx(link)


def test_a_line_through_measured_times():
    assert Line.fit({0: 1e-3, 1e6: 2e-3, 4e6: 5e-3}) == pytest.approx((1e-3, 1e-9))


@pytest.mark.parametrize(
    ("measured", "line"), [({1.0: 2.0, 2.0: 4.1}, (0.0, 2.024)), ({1.0: 2.0, 2.0: 1.9}, (1.949, 0.0))]
)
def test_neither_part_of_a_line_is_negative(measured, line):
    assert Line.fit(measured) == pytest.approx(line, abs=0.01)
