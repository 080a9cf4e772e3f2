from pipeswift.report.lanes import Bar, draw, picture

LANES = {
    "compute": [Bar(0, 1, "A", 0), Bar(3, 7, "E0", 0), Bar(7, 11, "E1", 0, 1), Bar(13, 14, "M", 0)],
    "all-to-all": [Bar(1, 3, "D0", 0), Bar(3, 6, "D1", 0, 1), Bar(7, 10, "C0", 0), Bar(11, 13, "C1", 0, 1)],
}


def test_a_row_per_lane():
    assert (
        draw(LANES, width=11 + 14)
        == """\
compute    A..E0--E1--..M
all-to-all .D-D1-.C0-.C-."""
    )


def test_what_is_shorter_than_a_character_is_left_out():
    assert draw({"a": [Bar(0, 0.1, "X", 0), Bar(0.1, 10, "Y", 0)]}, width=12) == "a Y---------"


def test_nothing_is_drawn_for_no_time():
    assert draw({"a": [Bar(0, 0, "X", 0)]}, width=6) == "a ...."


def test_the_picture_is_the_drawing_with_an_axis():
    lines = picture(LANES, width=11 + 14).plain.splitlines()
    assert "\n".join(lines[:2]) == draw(LANES, width=11 + 14)
    assert lines[2].split() == ["0", "14"]
