import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op
from pipeswift.program import BlockCosts, Form, Grain, Line, Part, choose, chunk, formulas, rule_of_thumb, simulate
from tests.program.programs import one_block, quick


def layer(ratio, latency, start=0.0, local=0.0):
    """Experts of 1 second per op, all-to-alls of `ratio` together without their latencies."""
    return BlockCosts(
        exchange=Line(latency, 1.0),
        sent=ratio / 2,
        experts=dict.fromkeys((Op.F, Op.I, Op.W), Line(start, 1.0)),
        local=local,
    )


def sweep(program, costs, most):
    cuts = {n: chunk(program, n, local_first=costs.local > 0) for n in range(1, most + 1)}
    return {number: simulate(cut, costs).elapsed for number, cut in cuts.items()}


@pytest.mark.parametrize("ratio", [0.3, 0.6, 0.9])
def test_where_compute_is_longer_the_formula_is_exact(ratio):
    costs, program = layer(ratio, latency=0.001, start=0.005), one_block(Op.F)
    best = min(sweep(program, costs, 64).items(), key=lambda item: item[1])[0]
    assert best == pytest.approx(formulas(program, costs)[0], abs=1)


def test_with_high_latency_one_chunk_is_chosen():
    for op in (Op.F, Op.B):
        assert choose(one_block(op), layer(0.9, latency=1.5), most=16).chunks == 1


def test_forward_and_backward_want_different_numbers():
    costs = layer(0.6, latency=0.002, start=0.01)
    forward, backward = (choose(one_block(op), costs, most=64).chunks for op in (Op.F, Op.B))
    assert forward > backward > 1


@pytest.mark.parametrize("op", [Op.F, Op.B])
@pytest.mark.parametrize("ratio", [0.6, 0.9, 1.2])
def test_at_low_latency_most_of_the_shorter_side_hides(op, ratio):
    costs, program = layer(ratio, latency=0.005, start=0.002), one_block(op)
    chosen = chunk(program, choose(program, costs, most=16).chunks)
    assert simulate(chosen, costs).efficiency > 0.85


@quick
@given(
    st.sampled_from((Op.F, Op.I, Op.B)),
    st.sampled_from((0.1, 0.3, 0.6, 1.0, 1.5, 3.0)),
    st.sampled_from((0.0, 1e-4, 1e-2, 0.1, 1.0)),
    st.sampled_from((0.0, 1e-3, 1e-2, 0.2)),
    st.sampled_from((0.0, 0.25, 0.5)),
    st.integers(1, 24),
)
def test_the_choice_is_the_best_of_a_full_sweep(op, ratio, latency, start, local, most):
    costs, program = layer(ratio, latency, start, local), one_block(op)
    everything = sweep(program, costs, most)
    choice = choose(program, costs, most=most)
    assert everything[choice.chunks] <= 1.01 * min(everything.values())
    assert choice.seconds.items() <= everything.items()


def test_where_costs_are_known_a_shared_expert_waits_to_hide_the_last_combine():
    """The local tokens hide the first dispatch already."""
    costs = BlockCosts(Line(0.0, 1.0), 0.4, {op: Line(0.0, 1.0) for op in Op}, 0.4, others={(Part.SHARED, Op.F): 0.3})
    program = one_block(Op.F, Form.MOE_SHARED)
    as_it_comes, arranged = (Grain(2, 2, known).cut(program, Op.F) for known in (None, costs))
    assert simulate(as_it_comes, costs).elapsed == pytest.approx(1.0 + 0.3 + 0.2)
    assert simulate(arranged, costs).elapsed == pytest.approx(1.0 + 0.3)
    assert [work.part for work in arranged.works][-2:] == [Part.SHARED, Part.MERGE]


def test_the_choice_can_be_overridden():
    assert choose(one_block(Op.F), layer(0.9, latency=9.0), most=16, chunks=4).chunks == 4


@pytest.mark.parametrize("chunks", [0, 17])
def test_an_override_is_a_number_of_groups_of_experts(chunks):
    with pytest.raises(PipeSwiftError, match=f"got chunks={chunks}; use a number from 1 to 16"):
        choose(one_block(Op.F), layer(0.9, latency=0.1), most=16, chunks=chunks)


def test_the_rule_of_thumb_is_about_one_chunk():
    program = one_block(Op.F)
    assert rule_of_thumb(program, layer(0.9, latency=0.0), 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rule_of_thumb(program, layer(0.3, latency=0.05), 8) == [3, 4, 5, 6, 7, 8]
    assert rule_of_thumb(program, layer(2.0, latency=0.05), 8) == []
