import pytest
from hypothesis import given

from pipeswift.ir import B, F, Op
from pipeswift.program import BlockCosts, Form, Lane, Line, Part, arrange, bound, chunk, compile_action, merge, simulate
from tests.program.programs import costs, layer, one_block, programs, quick, respects_its_needs

FORWARDS, BACKWARDS = (Op.F,), (Op.I, Op.B)


def test_a_shared_expert_hides_the_tokens_under_way():
    program = one_block(Op.F, Form.MOE_SHARED)
    seconds = {Part.DISPATCH: 1.0, Part.COMBINE: 1.0, Part.EXPERTS: 2.0, Part.SHARED: 1.0}
    arranged = arrange(program, lambda work: seconds.get(work.part, 0.0))
    assert simulate(arranged, lambda work: seconds.get(work.part, 0.0)).elapsed == 4.0


def test_the_host_rather_waits_for_counts_than_starts_a_shared_expert():
    """Whatever can start first would be the shared expert, and the dispatch would wait until it is done."""
    program = one_block(Op.F, Form.MOE_SHARED)
    seconds = {Part.COUNTS: 0.1, Part.DISPATCH: 2.0, Part.COMBINE: 1.0, Part.EXPERTS: 2.0, Part.SHARED: 2.0}
    names = [work.part for work in arrange(program, lambda work: seconds.get(work.part, 0.0)).works]
    assert names.index(Part.DISPATCH) < names.index(Part.SHARED)


def test_a_forward_and_a_backward_hide_each_other():
    """Communication as long as compute: alone none of it hides in the forward, woven nearly all does."""
    forward = compile_action(F(0, 1), layout=(Form.MOE,) * 4, takes=False, sends=False)
    backward = compile_action(B(0, 0), layout=(Form.MOE,) * 4, takes=False, sends=False)
    seconds = layer(1.0)
    alone = simulate(forward, seconds).elapsed + simulate(backward, seconds).elapsed
    woven = simulate(merge(forward, backward, seconds), seconds)
    assert alone == pytest.approx(4 * 2.0 + 4 * 2.5)
    assert woven.elapsed < 0.72 * alone
    assert woven.hidden > 0.9


@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("attention", [0.0, 0.5])
def test_chunks_woven_come_near_the_two_lane_ideal(ratio, attention):
    others = {(Part.ATTENTION, Op.F): attention, (Part.ATTENTION, Op.B): 2 * attention}
    experts = {op: Line(0.005, 1.0) for op in Op}
    seconds = BlockCosts(Line(0.005, 1.0), ratio / 2, experts, others=others)
    layout = (Form.MOE,) * 4
    forward, backward = (compile_action(a, layout=layout, takes=True, sends=True) for a in (F(0, 1), B(0, 0)))
    woven = merge(chunk(forward, 2), chunk(backward, 2), seconds)
    assert simulate(woven, seconds).elapsed < 1.04 * bound(woven, seconds)


@quick
@given(programs(), costs())
def test_an_arranged_program_does_the_same_and_is_never_slower(program, seconds):
    arranged = arrange(program, seconds)
    assert respects_its_needs(arranged)
    assert arranged.after == program.after
    assert simulate(arranged, seconds).elapsed <= simulate(program, seconds).elapsed * (1 + 1e-8)


@quick
@given(programs(FORWARDS, stage=1), programs(BACKWARDS), costs())
def test_a_merge_keeps_every_dependency_of_both(forward, backward, seconds):
    woven = merge(forward, backward, seconds)
    assert respects_its_needs(woven)
    assert woven.after == {**forward.after, **backward.after}
    elapsed = simulate(woven, seconds).elapsed
    assert bound(woven, seconds) <= elapsed * (1 + 1e-9) + 1e-9
    assert elapsed <= (simulate(forward, seconds).elapsed + simulate(backward, seconds).elapsed) * (1 + 1e-8)


@quick
@given(programs(FORWARDS, stage=1), programs(BACKWARDS), costs())
def test_ranks_that_agree_on_costs_issue_collectives_in_one_order(forward, backward, seconds):
    agreed = {work: seconds(work) for work in (*forward.works, *backward.works)}
    orders = [list(merge(forward, backward, cost).on(Lane.ALL_TO_ALL)) for cost in (seconds, agreed.__getitem__)]
    assert orders[0] == orders[1]


@quick
@given(programs(BACKWARDS), programs((Op.W,), stage=1), costs())
def test_weight_gradients_fill_what_is_left(backward, weights, seconds):
    woven = simulate(merge(backward, weights, seconds), seconds).elapsed
    alone = simulate(backward, seconds).elapsed + simulate(weights, seconds).elapsed
    assert woven <= alone * (1 + 1e-8)
