import pytest
from hypothesis import given

from pipeswift.ir import Action, Op
from pipeswift.program import Form, Lane, Part, bound, chunk, compile_action, simulate, together
from tests.program.programs import costs, layer, one_block, programs, quick


@pytest.mark.parametrize("ratio", [0.6, 0.9, 1.2])
def test_without_chunks_a_forward_overlaps_nothing(ratio):
    timeline = simulate(one_block(Op.F), layer(ratio))
    assert timeline.elapsed == pytest.approx(1 + ratio)
    assert timeline.efficiency == pytest.approx(max(1, ratio) / (1 + ratio))
    assert timeline.hidden == 0


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_where_compute_is_longer_only_the_first_and_the_last_all_to_all_show(chunks):
    """t(r) = 2 alpha + 2 n beta / r + r alpha_e + n_e beta_e."""
    program, seconds = chunk(one_block(Op.F), chunks), layer(0.6, latency=0.01)
    assert simulate(program, seconds).elapsed == pytest.approx(2 * 0.01 + 0.6 / chunks + chunks * 0.01 + 1)


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_where_communication_is_longer_the_link_never_rests(chunks):
    """2 r alpha + 2 n beta; the first chunk's compute shows only where the link has nothing else to send."""
    timeline = simulate(chunk(one_block(Op.F), chunks), layer(2.0, latency=0.001))
    assert timeline.elapsed == pytest.approx(2 * chunks * 0.001 + 2.0, abs=0.003)
    assert timeline.busy(Lane.ALL_TO_ALL) == pytest.approx(2 * chunks * 0.001 + 2.0)


def test_w_hides_the_way_home_even_in_one_chunk():
    timeline = simulate(one_block(Op.B), layer(0.6))
    assert timeline.elapsed == pytest.approx(0.3 + 1 + 1)
    assert timeline.hidden == pytest.approx(0.5)


def test_a_message_that_is_sent_keeps_nobody_waiting():
    program = compile_action(Action(1, Op.F, 0), layout=(Form.DENSE, Form.DENSE), takes=True, sends=True)
    seconds = {Part.INPUT: 2.0, Part.LAYERS: 1.0, Part.OUTPUT: 5.0}
    ends = [span.end for span in simulate(program, lambda work: seconds[work.part]).spans]
    assert ends == [2.0, 3.0, 4.0, 9.0]


@pytest.mark.parametrize("ratio", [0.3, 0.6, 0.9, 1.2, 2.0])
@pytest.mark.parametrize("op", [Op.F, Op.B])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 16])
def test_a_layer_alone_reaches_the_two_lane_ideal(ratio, op, chunks):
    program, seconds = chunk(one_block(op), chunks), layer(ratio, latency=0.001)
    assert simulate(program, seconds).elapsed == pytest.approx(bound(program, seconds), rel=0.01)


@quick
@given(programs(), costs())
def test_nothing_beats_the_bound(program, seconds):
    elapsed = simulate(program, seconds).elapsed
    assert bound(program, seconds) <= elapsed * (1 + 1e-9) + 1e-9


@quick
@given(programs(), costs())
def test_works_of_one_lane_never_overlap(program, seconds):
    spans = simulate(program, seconds).spans
    for lane in Lane:
        ends = 0.0
        for span in spans:
            if span.work.lane is lane:
                assert span.start >= ends
                ends = span.end


@quick
@given(programs(), costs())
def test_every_work_starts_after_what_it_needs(program, seconds):
    spans = {span.work: span for span in simulate(program, seconds).spans}
    for work, span in spans.items():
        assert all(spans[before].end <= span.start for before in program.after[work])


def test_ranks_meet_in_all_to_alls_and_wait_for_the_slowest():
    """Three ranks, one late, one with twice the experts: dispatches end together, and so do combines."""
    program = compile_action(Action(0, Op.F, 0), layout=(Form.MOE,), takes=False, sends=False)

    def takes(experts: float):
        return lambda work: {Part.ATTENTION: 1.0, Part.DISPATCH: 0.5, Part.EXPERTS: experts, Part.COMBINE: 0.5}.get(
            work.part, 0.0
        )

    timelines = together(program, [takes(1.0), takes(2.0), takes(1.0)], [0.0, 0.0, 3.0])
    ends = [{span.work.part: span.end for span in timeline.spans} for timeline in timelines]
    assert [end[Part.ATTENTION] for end in ends] == [1.0, 1.0, 4.0]
    assert [end[Part.DISPATCH] for end in ends] == [4.5, 4.5, 4.5]
    assert [end[Part.EXPERTS] for end in ends] == [5.5, 6.5, 5.5]
    assert [end[Part.COMBINE] for end in ends] == [7.0, 7.0, 7.0]
