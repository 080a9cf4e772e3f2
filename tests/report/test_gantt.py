import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.report import gantt
from pipeswift.report.palette import EXPOSED, HIDDEN, REDUCTION
from pipeswift.simulate import replay
from pipeswift.trace import QUEUE_DEPTH, Counter, EmptyTrace
from tests.report.timelines import LANES, SHORT, WOVEN, timeline

SCHEDULE = schedules.build("interleaved-1f1b", 2, 4)
COSTS = Costs.uniform(4, chunks=2)
TRACE = replay(SCHEDULE, COSTS)


def svg(*traces, **options):
    file = io.BytesIO()
    gantt.save(traces, file, format="svg", **options)
    return file.getvalue().decode()


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_every_pass_is_a_bar_with_its_micro_batch():
    figure = gantt.figure([TRACE])
    (bars,) = figure.axes[0].collections
    assert len(bars.get_paths()) == len(TRACE)
    assert sorted(texts(figure)) == sorted(str(i) for i in TRACE.microbatch)


def test_bars_lie_where_the_spans_are():
    (bars,) = gantt.figure([SHORT]).axes[0].collections
    boxes = [path.get_extents() for path in bars.get_paths()]
    assert [(box.x0, box.x1) for box in boxes] == [(0, 0.5), (2, 3), (0.5, 1), (1, 2)]
    assert [int(box.y0) for box in boxes] == [0, 0, 1, 1]


def test_woven_passes_share_the_height_of_the_row():
    figure = gantt.figure([WOVEN])
    (bars,) = figure.axes[0].collections
    boxes = [path.get_extents() for path in bars.get_paths()]
    assert [(box.x0, box.x1, box.y0, box.y1) for box in boxes] == [
        (0, 3, 0.06, 0.5),
        (0, 3, 0.5, 0.94),
        (0, 1, 1.06, 1.94),
        (1, 3, 1.06, 1.94),
    ]
    assert texts(figure) == ["1", "0", "1", "0"]


def test_several_traces_share_the_time_axis_rank_by_rank():
    slow = timeline((0, "0F0", 0, 4), (1, "1F0", 4, 6), name="measured")
    figure = gantt.figure([SHORT, slow])
    axes = figure.axes[0]
    assert axes.get_xlim() == (0, 6)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["short", "measured", "short", "measured"]
    assert {"rank 0", "rank 1"} <= set(texts(figure))


def test_the_headline_has_the_bubble_rates():
    assert "33 s, bubble 27.3% by span, 27.3% by makespan" in svg(
        replay(schedules.build("1f1b", 4, 8), Costs.uniform(4))
    )


def test_chunks_differ_in_shade_and_ops_in_hue():
    (bars,) = gantt.figure([TRACE]).axes[0].collections
    assert len({tuple(colour) for colour in bars.get_facecolor()}) == 4
    assert all(f">{label}<" in svg(TRACE) for label in ("F", "B", "chunk 0", "chunk 1"))


def test_all_to_alls_and_reductions_are_a_strip_at_the_foot_of_the_row():
    figure = gantt.figure([LANES])
    bars, *strips = figure.axes[0].collections
    assert max(path.get_extents().y1 for path in bars.get_paths()[:3]) < 0.72
    found = {}
    for strip in strips:
        for path in strip.get_paths():
            box = path.get_extents()
            assert (box.y0, box.y1) == pytest.approx((0.72, 0.94))
            found.setdefault(to_hex(strip.get_facecolor()[0]), []).append((box.x0, box.x1))
    assert found == {HIDDEN: [(1, 2), (6, 7)], EXPOSED: [(2, 3)], REDUCTION: [(8, 9)]}
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["F", "B", "all-to-all, hidden", "exposed", "reduction"]


def test_notes_are_below_with_their_blanks():
    assert "rank\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}0" in svg(SHORT, notes="rank  0\nrank  1")
    height = gantt.figure([SHORT]).get_size_inches()[1]
    assert gantt.figure([SHORT], notes="rank  0\nrank  1").get_size_inches()[1] == pytest.approx(height + 3 * 0.125)


def test_the_headline_has_room_for_a_few_traces():
    (headline,) = (text for text in gantt.figure([SHORT] * 6).texts if "bubble" in text.get_text())
    assert headline.get_text() == "     ".join(["short: 3 s, bubble 50.0%"] * 4 + ["..."])


def test_what_waited_is_a_line_over_the_bars():
    queue = Counter(QUEUE_DEPTH, 1, np.array([0.0, 1.0, 2.0]), np.array([0, 2, 1]))
    picture = gantt.figure([replace(SHORT, counters=(queue,))])
    (line,) = picture.axes[0].lines
    assert line.get_ydata() == pytest.approx([1.94, 1.06, 1.5])  # rank 1's row is from 1 to 2
    assert "queue depth" in [text.get_text() for text in picture.legends[0].get_texts()]


def test_the_memory_curve_is_below():
    bars, curves = gantt.figure([TRACE], memory=COSTS.memory).axes
    assert [max(line.get_ydata()) for line in curves.lines] == [2.5, 1.5]
    assert bars.get_xlim() == curves.get_xlim()


def test_numbers_that_do_not_fit_are_left_out():
    long = replay(schedules.build("1f1b", 2, 400), Costs.uniform(2))
    assert texts(gantt.figure([long])) == []


def test_short_steps_are_shown_in_milliseconds():
    assert ">time, ms<" in svg(timeline((0, "0F0", 5, 5.02)))


def test_the_same_picture_is_the_same_file():
    assert svg(TRACE, memory=COSTS.memory) == svg(TRACE, memory=COSTS.memory)
    assert "<dc:date>" not in svg(TRACE)


def test_png():
    file = io.BytesIO()
    gantt.save([TRACE], file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_a_thousand_ranks_make_a_picture_of_ordinary_size():
    width, height = gantt.figure([replay(schedules.build("gpipe", 1000, 1), Costs.uniform(1000))]).get_size_inches()
    assert width < 12
    assert height < 14


def test_an_empty_trace_has_no_picture():
    with pytest.raises(EmptyTrace):
        gantt.figure([TRACE.only(TRACE.rank > 9)])


def test_pictures_are_drawn_without_pyplot():
    code = "import sys; from pipeswift.report import gantt; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
