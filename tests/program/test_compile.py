import pytest
from hypothesis import given

from pipeswift.ir import Action, B, F, I, Op, W
from pipeswift.program import Form, Kind, compile_action
from tests.program.programs import one_block, programs, quick, respects_its_needs, text

DENSE, MOE, SHARED = Form


def test_a_dense_forward_takes_computes_and_sends():
    program = compile_action(F(1, 0), layout=(DENSE, DENSE), takes=True, sends=True)
    assert text(program) == "take input\nrun layers\nrun layers\nsend output"
    assert [work.segment for work in program.works] == [0, 0, 1, 1]


def test_a_backward_goes_downwards():
    program = compile_action(B(1, 0), layout=(DENSE, DENSE), takes=True, sends=True)
    assert [work.segment for work in program.works] == [1, 1, 0, 0]


def test_a_dense_backward_is_not_cut_in_halves():
    (work,) = compile_action(B(0, 0), layout=(DENSE,), takes=False, sends=False).works
    assert work.op is Op.B


def test_w_neither_takes_nor_sends():
    assert text(compile_action(W(1, 0), layout=(DENSE,), takes=True, sends=True)) == "run layers"


def test_the_forward_of_a_block_exchanges_counts_before_tokens():
    assert (
        text(one_block(Op.F, SHARED))
        == """\
run attention
launch counts
wait counts
launch dispatch
run shared
wait dispatch
run experts
launch combine
wait combine
run merge"""
    )


def test_the_backward_of_a_block_computes_weight_gradients_while_gradients_travel():
    assert (
        text(one_block(Op.B, SHARED))
        == """\
run merge.I
launch combine.I
run shared
wait combine.I
run experts.I
launch dispatch.I
run experts.W
wait dispatch.I
run attention"""
    )


def test_i_and_w_share_the_backward_between_them():
    assert (
        text(one_block(Op.I))
        == """\
run merge
launch combine
wait combine
run experts
launch dispatch
wait dispatch
run attention"""
    )
    assert text(one_block(Op.W, SHARED)) == "run shared\nrun experts\nrun attention"


@pytest.mark.parametrize("make", [F, I, B])
def test_the_next_segment_waits_for_the_whole_block(make):
    program = compile_action(make(0, 0), layout=(MOE, MOE), takes=False, sends=False)
    first, second = (0, 1) if make is F else (1, 0)
    entry = next(work for work in program.works if work.segment == second)
    assert [work.segment for work in program.after[entry]] == [first]


@quick
@given(programs())
def test_every_program_respects_its_needs(program):
    assert respects_its_needs(program)


def test_a_work_reads_like_its_action():
    action = Action(2, Op.B, 5)
    launches = [step.work for step in compile_action(action, layout=(MOE,), takes=False, sends=False).steps]
    assert str(launches[0]) == "2B5 merge.I"
    assert str(launches[0]._replace(chunk=1, chunks=4)) == "2B5 merge.I[1/4]"


def test_nothing_is_launched_in_a_dense_program():
    kinds = {step.kind for step in compile_action(I(1, 0), layout=(DENSE,), takes=True, sends=True).steps}
    assert kinds == {Kind.TAKE, Kind.COMPUTE, Kind.SEND}
