"""Held-out files are never trained on, and the same numbers draw the same bytes everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswift.errors import PipeSwiftError
from pipeswift.train import data


def test_no_file_of_the_standard_library_is_on_both_sides():
    root, files = data.files_of(None)
    training, held_out = data.split(root, files)
    assert not set(training) & set(held_out)
    assert sorted([*training, *held_out]) == files
    assert len(training) > 100
    assert len(held_out) > 10


def test_the_standard_library_is_its_source_without_tests_and_installed_packages():
    root, files = data.files_of(None)
    names = [file.relative_to(root).as_posix() for file in files]
    assert "argparse.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if "site-packages" in name or "tests/" in name]


def test_held_out_text_is_never_drawn_for_training(tmp_path):
    for number in range(200):
        side = b"h" if data.is_held_out(f"{number}.txt") else b"t"
        (tmp_path / f"{number}.txt").write_bytes(side * 50)
    text = data.load(tmp_path, window=9)
    assert set(text.held_out.tobytes()) == {ord("h")}
    assert set(text.training.tobytes()) == {ord("t")}
    assert len(text.training) + len(text.held_out) == 200 * 50


def test_the_split_depends_on_names_only(tmp_path):
    names = [f"{number}.txt" for number in range(200)]
    sides = []
    for copy in ("here", "there"):
        folder = tmp_path / copy
        folder.mkdir()
        for name in names:
            (folder / name).write_text(copy * 9)
        sides.append([file.name for file in data.split(*data.files_of(folder))[1]])
    assert sides[0] == sides[1] == [name for name in sorted(names) if data.is_held_out(name)]


@given(names=st.lists(st.integers(0, 10_000).map("{}.txt".format), min_size=2, max_size=5, unique=True))
def test_of_several_files_each_side_gets_one(tmp_path_factory, names):
    root = tmp_path_factory.getbasetemp()
    training, held_out = data.split(root, [root / name for name in names])
    assert training
    assert held_out
    assert len(training) + len(held_out) == len(names)


def test_a_single_file_holds_out_its_end(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(200)))
    text = data.load(file, window=5)
    assert text.training.tobytes() + text.held_out.tobytes() == bytes(range(200))
    assert len(text.held_out) == 10


def test_hidden_files_are_left_out(tmp_path):
    (tmp_path / "seen.txt").write_text("seen")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    assert [file.name for file in data.files_of(tmp_path)[1]] == ["seen.txt"]


def test_a_batch_is_the_same_for_the_same_numbers_and_shifted_by_one_byte():
    text = np.arange(200, dtype=np.uint8)
    inputs, targets = data.batch(text, size=4, context=8, seed=1, number=2)
    again, _ = data.batch(text, size=4, context=8, seed=1, number=2)
    other, _ = data.batch(text, size=4, context=8, seed=1, number=3)
    assert inputs.shape == targets.shape == (4, 8)
    assert np.array_equal(inputs, again)
    assert not np.array_equal(inputs, other)
    assert np.array_equal(targets, inputs + 1)


def test_every_byte_can_be_drawn():
    inputs, targets = data.batch(np.arange(9, dtype=np.uint8), size=64, context=4, seed=0, number=0)
    assert inputs.min() == 0
    assert targets.max() == 8


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "holds no file"),
        (lambda path: path.write_text("short"), "too little text"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(tmp_path, make, says):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(PipeSwiftError, match=says) as caught:
        data.load(path, window=9)
    assert str(path) in str(caught.value)


def test_ranks_with_other_text_have_another_fingerprint(tmp_path):
    prints = set()
    for content in ("one " * 50, "two " * 50):
        (tmp_path / "text").write_text(content)
        prints.add(data.load(tmp_path / "text", window=9).fingerprint)
    assert len(prints) == 2
