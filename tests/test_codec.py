import csv
import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift import codec
from pipeswift.codec import ScheduleFileError, from_csv, from_json, load, read_json, save, to_csv, to_json
from pipeswift.ir import Action, B, F, Op, Order, Overlap, Schedule, vee
from pipeswift.passes import split_backward
from pipeswift.schedules import build, entries, gpipe, interleaved, one_f_one_b

TWO_WAY = Schedule(
    orders=(Order.of([F(0, 0), F(1, 1), B(1, 1), B(0, 0)]), Order.of([F(0, 1), Overlap(F(1, 0), B(0, 1)), B(1, 0)])),
    routes=((0, 1), (1, 0)),
    route_of=(0, 1),
    name="two-way",
    flush=False,
)


def test_a_csv_has_a_row_per_rank_and_a_cell_per_action():
    assert to_csv(split_backward(one_f_one_b(2, 2))) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


@pytest.mark.parametrize("found", entries(), ids=lambda found: found.name)
def test_every_generator_survives_both_forms(found):
    for p, m in ((1, 3), (2, 4), (4, 8)):
        if not all(rule.holds(p, m) for rule in found.rules):
            continue
        schedule = build(found.name, p, m)
        assert from_json(to_json(schedule)) == schedule
        if len(schedule.routes) == 1:
            assert from_csv(to_csv(schedule), name=schedule.name) == replace(schedule, options={}, flush=True)


def test_empty_cells_and_spaces_mean_nothing():
    text = "0F0 ,,  0F1,, ( 0F2 ; 0B0 ) OVERLAP_F_B ,\r\n , 1F0\t,1B0\r\n\r\n,,\r\n"
    assert to_csv(from_csv(text)) == "0F0,0F1,(0F2;0B0)OVERLAP_F_B\n1F0,1B0\n"


def test_the_route_is_read_off_the_rows():
    text = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    assert from_csv(text).routes == (tuple(vee(stage, 2) for stage in range(4)),)
    assert to_csv(from_csv(text)) == text


@pytest.mark.parametrize(
    "cell", ["0X3", "F3", "0F", "0F3x", "0f3", "-1F0", "0F1.0", "0 F 0", "0SEND_F0", "(0F1;0B0)", "٣F0"]
)
def test_a_bad_cell_is_named(cell):
    with pytest.raises(ScheduleFileError) as caught:
        from_csv(f"0F0,0B0\n1F0, {cell} ,1B0\n", path="mine.csv")
    assert str(caught.value) == (
        f"mine.csv, row 2, column 2: {cell!r} is not an action. "
        "Write stage, F, I, W or B, and micro-batch, such as 0F3, or an overlap, (0F4;3B1)OVERLAP_F_B."
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "the CSV is empty"),
        (",,\n", "the CSV is empty"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is in row 1 and in row 2"),
        ("0F0,0B0\n2F0,2B0\n", "no row runs stage 1, though stage 2 is there"),
        ("0F0,0F999999999\n", "no row runs micro-batch 1, though micro-batch 999999999 is there"),
    ],
)
def test_a_csv_that_makes_no_schedule(text, error):
    with pytest.raises(ScheduleFileError, match=error):
        from_csv(text)


def test_a_csv_cannot_say_several_routes():
    with pytest.raises(ScheduleFileError, match=r"holds one route and two-way has 2. Save it as .json"):
        to_csv(TWO_WAY)


def test_json_says_everything():
    assert from_json(to_json(TWO_WAY)) == TWO_WAY
    schedule = build("interleaved-1f1b", 2, 4)
    assert from_json(to_json(schedule)) == schedule


def test_json_carries_notes():
    text = to_json(gpipe(2, 2), costs={"F": [1.5]}, provenance={"by": "hand"})
    assert read_json(text) == (gpipe(2, 2), {"F": [1.5]}, {"by": "hand"})
    assert read_json(to_json(gpipe(2, 2)))[1:] == (None, None)


def changed(**keys) -> str:
    return json.dumps(json.loads(to_json(gpipe(2, 2))) | keys)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0F0,0B0", "the JSON is not JSON"),
        ("[" * 100_000, "the JSON is not JSON"),  # was a RecursionError
        ("[]", 'it needs "format": "pipeswift-schedule"'),
        (changed(format="other"), 'it needs "format": "pipeswift-schedule"'),
        (changed(version=2), "has version 2 of the format, and this program reads 1"),
        (changed(orders=None), "'orders' is None. It has to be such as"),
        (changed(orders=["0F0"]), "rank 0 of 'orders' is '0F0'"),
        (changed(orders=[["0F0", "0F"]]), "the JSON, rank 0, entry 1: '0F' is not an action"),
        (changed(orders=[["0F0", 3]]), "rank 0, entry 1: '3' is not an action"),
        (changed(routes=[[0, "1"]]), r"'routes' holds \[0, '1'\]. It has to be whole numbers"),
        (changed(routes=[0, 1]), "'routes' holds 0. It has to be whole numbers"),
        (changed(route_of=[True, 0]), "'route_of' holds"),
        (changed(flush=1), "'flush' is 1. It has to be such as true"),
        (changed(name=None), "'name' is None"),
        (changed(costs=3), "'costs' is 3"),
    ],
)
def test_a_json_that_makes_no_schedule(text, error):
    with pytest.raises(ScheduleFileError, match=error):
        from_json(text)


def test_files_go_by_their_suffix(tmp_path):
    schedule = interleaved(2, 4, 2)
    for path in (tmp_path / "mine.csv", tmp_path / "mine.JSON"):
        save(schedule, path)
        assert load(path).orders == schedule.orders
    assert load(str(tmp_path / "mine.csv")).name == "mine"
    assert load(tmp_path / "mine.JSON").name == "custom"


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ScheduleFileError, match=r"there is no schedule file .*gone.csv"):
        load(tmp_path / "gone.csv")
    with pytest.raises(ScheduleFileError, match=r"ends in .csv or .json: got .*mine.txt"):
        save(gpipe(1, 1), tmp_path / "mine.txt")
    with pytest.raises(ScheduleFileError, match="cannot write"):
        save(gpipe(1, 1), tmp_path / "nowhere" / "mine.csv")
    (tmp_path / "noise.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleFileError, match="cannot read"):
        load(tmp_path / "noise.csv")
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbf0F0,0B0\n")
    assert load(tmp_path / "marked.csv").orders == gpipe(1, 1).orders


actions = st.builds(Action, st.integers(0, 10**9 - 1), st.sampled_from(Op), st.integers(0, 10**9 - 1))


@given(st.one_of(actions, st.builds(Overlap, actions, actions)))
def test_parsing_undoes_printing(entry):
    assert codec.parse_entry(str(entry), "here") == entry


@given(st.text(max_size=12))
def test_other_text_is_refused_or_is_that_action(text):
    try:
        entry = codec.parse_entry(text, "here")
    except ScheduleFileError:
        return
    assert [int(part) if part.isdigit() else part for part in _tokens(text)] == [
        int(part) if part.isdigit() else part for part in _tokens(str(entry))
    ]


def _tokens(text: str) -> list[str]:
    return [part for part in "".join(f" {c} " if not c.isdigit() else c for c in text).split() if part]


def test_the_csv_is_torchs():
    """torch's own action type, written by torch's own way of writing a schedule, gives the same text."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    def theirs(entry: Action | Overlap) -> _Action:
        if isinstance(entry, Overlap):
            parts = (theirs(entry.first), theirs(entry.second))
            return _Action(-1, _ComputationType.OVERLAP_F_B, None, parts)
        return _Action(entry.stage, _ComputationType(entry.op.name), entry.microbatch)

    overlapping = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1")
    ours = [build(found.name, 2, 4) for found in entries()]
    for schedule in (*(one for one in ours if len(one.routes) == 1), split_backward(gpipe(2, 2)), overlapping):
        written = io.StringIO()
        csv.writer(written).writerows([theirs(entry) for entry in order] for order in schedule.orders)
        assert written.getvalue().replace("\r\n", "\n") == to_csv(schedule)
        assert from_csv(written.getvalue()).orders == schedule.orders
        for entry in schedule.orders[0]:
            assert _Action.from_str(str(entry)) == theirs(entry)
