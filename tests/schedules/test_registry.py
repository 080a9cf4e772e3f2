from types import MappingProxyType

import numpy as np
import pytest

from pipeswift.ir import Schedule
from pipeswift.schedules import Rule, ScheduleError, Times, build, entries, entry, one_f_one_b
from pipeswift.schedules.registry import Entry, _broken
from pipeswift.verify import peak_activations
from tests.schedules.figure import idle


def grid():
    for found in entries():
        for p in (1, 2, 3, 4, 8):
            for m in (1, 2, 3, 4, 5, 8, 12, 24):
                for v in (1, 2, 3) if found.any_chunks else (found.chunks,):
                    if all(rule.holds(p, m) for rule in found.rules):
                        yield found, p, m, v


def test_the_list():
    assert [found.name for found in entries()] == [
        "naive",
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "v-half",
        "v-min",
        "pipedream",
        "dualpipe",
        "dualpipe-v",
        "1f1b-overlap",
        "interleaved-1f1b-overlap",
    ]
    assert all(found.paper and found.summary.endswith(".") for found in entries())


@pytest.mark.parametrize(("name", "second"), [("zb-v", 7), ("v-half", 7), ("v-min", 7), ("interleaved-1f1b", None)])
def test_a_schedule_owns_its_placement(name, second):
    # Case 17.5: at p = 4, v = 2, a V holds stages r and 7 - r on rank r, a loop r and r + 4.
    held = [[stage for _, stage in build(name, 4, 8).stages_on(rank)] for rank in range(4)]
    assert held == [[rank, second - rank if second else rank + 4] for rank in range(4)]


def test_closed_forms_of_memory_agree_with_the_orders():
    for found, p, m, v in grid():
        peaks = peak_activations(build(found.name, p, m, v))
        assert found.memory is not None
        bounds = np.array([found.memory.of(p, m, v, r) for r in range(p)])
        assert (peaks <= bounds + 1e-9).all()
        assert peaks.max() == pytest.approx(bounds.max())


def test_closed_forms_of_idle_time_agree_with_the_orders():
    for found, p, m, v in grid():
        assert found.bubble is not None
        for times in (Times(F=1, I=1, W=1), Times(F=2, I=1, W=0.5)):
            if found.bubble.holds(p, m, times):
                idle_times = idle(build(found.name, p, m, v), Times(*(x / v for x in times)), found.bubble.by)
                expected = found.bubble.of(p, m, v, times)
                assert max(idle_times) == pytest.approx(expected)
                assert found.bubble.by == "span" or min(idle_times) == pytest.approx(expected)


def test_build_names_the_schedule():
    made = build("1f1b", 3, 4)
    assert (made.name, made.options, made.orders) == ("1f1b", {}, one_f_one_b(3, 4).orders)
    made = build("interleaved-1f1b", 2, 4, 3)
    assert (made.name, made.options) == ("interleaved-1f1b", MappingProxyType({"chunks": 3}))


def test_chunks_have_a_default():
    assert build("interleaved-1f1b", 4, 8).num_stages == 8


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            ("1f1", 4, 8),
            "there is no schedule '1f1'. Did you mean 1f1b? The schedules are naive, gpipe, 1f1b, interleaved-1f1b, "
            "zb-h1, zb-h2, zb-v, v-half, v-min, pipedream, dualpipe, dualpipe-v, 1f1b-overlap, "
            "interleaved-1f1b-overlap.",
        ),
        (("gpipe", 4, 0), "--microbatches must be at least 1: got --microbatches 0. Use 1 or more."),
        (("gpipe", 0, 4), "--pp must be at least 1: got --pp 0. Use 1 or more."),
        (("interleaved-1f1b", 4, 8, 0), "--chunks must be at least 1: got --chunks 0. Use 1 or more."),
        (
            ("gpipe", 4, 4, 2),
            "gpipe takes one chunk per rank: got --chunks 2. Use --chunks 1, or interleaved-1f1b, "
            "interleaved-1f1b-overlap.",
        ),
        (
            ("interleaved-1f1b", 4, 6),
            "interleaved-1f1b needs a number of micro-batches that is a multiple of --pp: got --microbatches 6 with "
            "--pp 4. Use 4 or 8, or a schedule without that rule (naive, gpipe, 1f1b, zb-h1, zb-h2, zb-v, "
            "v-half, v-min, pipedream, 1f1b-overlap).",
        ),
        (
            ("interleaved-1f1b", 4, 2),
            "interleaved-1f1b needs a number of micro-batches that is a multiple of --pp: got --microbatches 2 with "
            "--pp 4. Use 4 or 8, or a schedule without that rule (naive, gpipe, 1f1b, zb-h1, zb-h2, zb-v, "
            "v-half, v-min, pipedream, 1f1b-overlap).",
        ),
    ],
)
def test_what_does_not_fit_is_explained(request_, text):
    with pytest.raises(ScheduleError) as caught:
        build(*request_)
    assert str(caught.value) == text


def test_a_rule_may_be_about_the_ranks():
    even = Rule("--pp", "an even number of ranks", lambda p, m: p % 2 == 0)
    found = Entry("two-way", lambda p, m: Schedule((), (), ()), "", None, None, (even,), 1, False)
    assert _broken(found, even, 5, 8).startswith(
        "two-way needs an even number of ranks: got --pp 5. Use 4 or 6, or a schedule without that rule"
    )


def test_entry_finds_by_name():
    assert entry("gpipe").chunks == 1
