from textwrap import dedent

import pytest
from rich.console import Console

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.report.terminal import draw, picture
from pipeswift.simulate import replay
from pipeswift.trace import EmptyTrace
from tests.report.timelines import SHORT, WOVEN, timeline


def simulated(name, p, m, chunks=1, **seconds):
    schedule = schedules.build(name, p, m, chunks)
    return replay(schedule, Costs.uniform(schedule.num_stages, chunks=chunks, **seconds))


def figure(text):
    return dedent(text).strip()


def test_one_f_one_b_is_the_figure():
    assert draw(simulated("1f1b", 3, 4, I=0.5, W=0.5)) == figure("""
        F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
    """)


def test_a_long_pass_is_carried_on_by_dashes():
    assert draw(SHORT) == figure("""
        F0 .. .. .. B0---
        .. F0 B0--- .. ..
    """)


def test_ranks_with_several_stages_show_the_stage():
    assert draw(simulated("interleaved-1f1b", 2, 2, chunks=2)) == figure("""
        0F0 0F1 2F0 2F1 ... ... ... 2B0---- 2B1---- 0B0---- 0B1----
        ... 1F0 1F1 3F0 3F1 3B0---- 3B1---- 1B0---- 1B1---- ... ...
    """)


def test_the_grid_is_the_largest_that_all_times_lie_on():
    trace = timeline((0, "0F0", 0, 2), (0, "0B0", 2, 5), (1, "1F0", 0, 1))
    assert draw(trace) == figure("""
        F0--- B0------
        F0 .. .. .. ..
    """)


def test_two_digits_widen_every_cell():
    trace = timeline((0, "0F9", 0, 1), (0, "0F10", 1, 2), (1, "1F9", 1, 2))
    assert draw(trace) == figure("""
        F9  F10
        ... F9
    """)


def test_times_without_a_common_grid_are_scaled_to_the_width():
    trace = timeline((0, "0F0", 0, 1.0), (0, "0B0", 2.0, 3.14159), (1, "1F0", 1.0, 1.2))
    assert draw(trace, width=30) == figure("""
        F0--------.........B0---------
        ..........F...................
    """)


def test_where_only_a_letter_fits_later_chunks_are_in_lower_case():
    trace = timeline((0, "0F0", 0, 1), (0, "1F0", 1, 2), (0, "1B0", 2, 3), (0, "0B0", 3, 4))
    assert draw(trace, width=8) == "F-f-b-B-"


def test_woven_passes_share_a_bar():
    assert draw(WOVEN) == figure("""
        F1&B0---
        F1 B0---
    """)
    short = timeline((0, "0F1", 0, 1), (0, "0B0", 0, 1), (0, "0F2", 1, 2))
    assert draw(short) == "F1&B0 F2"


def test_woven_passes_on_a_small_scale():
    assert draw(WOVEN, width=7).splitlines()[0] == "F1&B0--"
    assert draw(WOVEN, width=4).splitlines()[0] == "FB--"
    assert draw(WOVEN, width=1).splitlines()[0] == "&"


def test_woven_passes_keep_their_colours():
    backgrounds = {span.style for span in picture(WOVEN.only(WOVEN.rank == 0)).spans if " on " in str(span.style)}
    assert len(backgrounds) == 2


def test_a_pass_too_short_for_a_column_is_left_out():
    trace = timeline((0, "0F0", 0, 0.001), (0, "0B0", 0.001, 10))
    assert draw(trace, width=10) == "B0--------"


@pytest.mark.parametrize("width", [1, 7, 40, 79, 160])
def test_no_line_is_longer_than_the_width(width):
    trace = simulated("1f1b", 4, 8, F=1.1, I=1.3, W=0.7)
    assert max(map(len, draw(trace, width).splitlines())) <= width


def test_an_empty_trace_has_no_picture():
    trace = SHORT.only(SHORT.rank > 9)
    with pytest.raises(EmptyTrace):
        draw(trace)


def test_the_picture_for_people_names_ranks_and_has_a_time_axis():
    console = Console(width=40, color_system=None)
    with console.capture() as printed:
        console.print(picture(SHORT, 40), end="")
    assert [line.rstrip() for line in printed.get().splitlines()] == [
        "rank 0 F0 .. .. .. B0---",
        "rank 1 .. F0 B0--- .. ..",
        "       0               3",
    ]


def test_the_picture_for_people_has_a_colour_per_op():
    backgrounds = {span.style for span in picture(SHORT).spans if " on " in str(span.style)}
    assert len(backgrounds) == 2
