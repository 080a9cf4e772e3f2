import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action, Op
from pipeswift.program import LOCAL, Form, Kind, Lane, Part, Step, chunk, compile_action
from tests.program.programs import layouts, one_block, quick, respects_its_needs, text


def test_while_a_chunk_computes_the_next_arrives_and_the_last_leaves():
    assert (
        text(chunk(one_block(Op.F), 3))
        == """\
run attention
launch counts
wait counts
launch dispatch[0/3]
launch dispatch[1/3]
launch dispatch[2/3]
wait dispatch[0/3]
run experts[0/3]
launch combine[0/3]
wait dispatch[1/3]
run experts[1/3]
launch combine[1/3]
wait dispatch[2/3]
run experts[2/3]
launch combine[2/3]
wait combine[0/3]
wait combine[1/3]
wait combine[2/3]
run merge"""
    )


def test_local_tokens_are_computed_while_the_first_chunk_arrives():
    assert (
        text(chunk(one_block(Op.F), 2, local_first=True))
        == """\
run attention
launch counts
wait counts
launch dispatch[0/2]
launch dispatch[1/2]
run experts[local]
wait dispatch[0/2]
run experts[0/2]
launch combine[0/2]
wait dispatch[1/2]
run experts[1/2]
launch combine[1/2]
wait combine[0/2]
wait combine[1/2]
run merge"""
    )


def test_weight_gradients_hide_the_last_gradients_on_their_way():
    assert (
        text(chunk(one_block(Op.B), 2))
        == """\
run merge.I
launch combine.I[0/2]
launch combine.I[1/2]
wait combine.I[0/2]
run experts.I[0/2]
launch dispatch.I[0/2]
wait combine.I[1/2]
run experts.I[1/2]
launch dispatch.I[1/2]
run experts.W[0/2]
run experts.W[1/2]
wait dispatch.I[0/2]
wait dispatch.I[1/2]
run attention"""
    )


def test_a_weight_gradient_is_of_all_tokens_of_its_group():
    """Each is added to once, so its bits do not depend on whether local tokens went first."""
    program = chunk(one_block(Op.B), 2, local_first=True)
    weights = [work for work in program.works if work.part is Part.EXPERTS and work.op is Op.W]
    assert [work.chunk for work in weights] == [0, 1]
    for work in weights:
        assert [before.chunk for before in program.after[work]] == [LOCAL, work.chunk]


def test_whoever_needs_all_tokens_waits_for_the_local_ones_too():
    program = chunk(one_block(Op.F), 2, local_first=True)
    merge = program.works[-1]
    assert {(work.part, work.chunk) for work in program.after[merge]} == {
        (Part.COMBINE, 0),
        (Part.COMBINE, 1),
        (Part.EXPERTS, LOCAL),
    }


@quick
@given(layouts, st.sampled_from((Op.F, Op.I, Op.B)), st.integers(1, 5), st.booleans())
def test_chunks_keep_every_dependency(layout, op, chunks, local_first):
    whole = compile_action(Action(0, op, 0), layout=layout, takes=True, sends=True)
    cut = chunk(whole, chunks, local_first=local_first)
    assert respects_its_needs(cut)
    before = {work: _ancestors(whole, work) for work in whole.works}
    for work in cut.works:
        if work.chunk != LOCAL:
            original = work._replace(chunk=0, chunks=1)
            assert {piece._replace(chunk=0, chunks=1) for piece in _ancestors(cut, work) if piece.chunk != LOCAL} == (
                before[original]
            )


@quick
@given(st.sampled_from((Op.F, Op.I)), st.integers(2, 5), st.booleans())
def test_a_chunk_computes_only_with_the_next_one_under_way(op, chunks, local_first):
    program = chunk(one_block(op), chunks, local_first=local_first)
    launches = {step.work for step in program.steps if step.kind is Kind.LAUNCH}
    arriving, leaving = (Part.DISPATCH, Part.COMBINE) if op is Op.F else (Part.COMBINE, Part.DISPATCH)
    experts = [work for work in program.works if work.part is Part.EXPERTS and work.chunk >= 0]
    for work in experts:
        position = program.steps.index(Step(Kind.COMPUTE, work))
        earlier = {step.work for step in program.steps[:position] if step.kind is Kind.LAUNCH}
        assert work.chunk + 1 == chunks or work._replace(part=arriving, chunk=work.chunk + 1) in earlier
        assert work.chunk == 0 or work._replace(part=leaving, chunk=work.chunk - 1) in earlier
    assert len(launches) == 2 * chunks + (op is Op.F)


def test_what_sends_nothing_stays_whole():
    dense = compile_action(Action(0, Op.F, 0), layout=(Form.DENSE,), takes=True, sends=True)
    assert chunk(dense, 4).steps == dense.steps
    weights = one_block(Op.W, Form.MOE_SHARED)
    assert chunk(weights, 4).steps == weights.steps


def test_collectives_have_one_order_whatever_the_rank():
    names = [str(work) for work in chunk(one_block(Op.F), 2).on(Lane.ALL_TO_ALL)]
    assert names == ["0F0 counts", "0F0 dispatch[0/2]", "0F0 dispatch[1/2]", "0F0 combine[0/2]", "0F0 combine[1/2]"]


def test_a_number_of_chunks_below_one_is_refused():
    with pytest.raises(PipeSwiftError, match="got chunks=0; 1 leaves it whole"):
        chunk(one_block(Op.F), 0)


def test_a_program_is_cut_once():
    with pytest.raises(PipeSwiftError, match="in chunks already"):
        chunk(chunk(one_block(Op.F), 2), 2)


def _ancestors(program, work):
    found = set()
    for before in program.after[work]:
        found |= {before} | _ancestors(program, before)
    return found
