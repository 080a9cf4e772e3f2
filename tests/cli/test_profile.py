"""`pipeswift profile` prints what layers cost, writes it down, and refuses what does not fit in one message."""

import re

import pytest

from pipeswift.plan.profile import Profile

SETTINGS = """
[model]
blocks = 2
width = 16
heads = 2
context = 16
vocabulary = 300
[pipeline]
pp = 2
"""
RATES = ("--flops", "1e9", "--bandwidth", "1e9")


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(SETTINGS)
    return file


def test_an_estimate_as_a_table_and_as_a_file(settings, tmp_path, pipeswift):
    code, out, _ = pipeswift("profile", settings, *RATES, "--sizes", "2,1", "--json", tmp_path / "p.json")
    assert code == 0
    assert "4 layers estimated for 1e+09 FLOP/s, 1e+09 B/s" in out
    for row in (r"0 Embedding +1 .*\n +2 ", r"1-2 Block +1 .*\n +2 ", r"3 Head +1 .*\n +2 "):
        assert re.search(row, out), out
    profile = Profile.load(tmp_path / "p.json")
    assert profile.source == "analytic"
    assert profile.sizes == (1, 2)
    assert [layer.name for layer in profile.layers] == ["Embedding", "Block", "Block", "Head"]
    assert profile.parameter_bytes[0] == 300 * 16 * 4


def test_a_measurement_on_this_machine(settings, pipeswift):
    code, out, _ = pipeswift("profile", settings, "--sizes", "2", "--json", "-")
    assert code == 0
    profile = Profile.from_json(out)
    assert (profile.source, profile.threads, profile.sizes) == ("measured", 1, (2,))
    assert (profile.seconds() > 0).all()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--flops", "1e9"], 1, "--flops and --bandwidth go together"),
        (["--sizes", "0,1"], 2, "0,1 is not a list of whole numbers from 1"),
        (["--sizes", "one"], 2, "Use 1,2,4, say"),
        (["--set", "model.vocabulary=100"], 1, "model.vocabulary = 100"),
        (["--json", "nowhere/p.json", "--sizes", "1", *RATES], 1, "--json cannot write nowhere/p.json"),
    ],
)
def test_bad_input_is_one_message(settings, pipeswift, options, code, says):
    answer = pipeswift("profile", settings, *options)
    assert answer.code == code
    assert says in answer.err
    assert answer.err.count("\n") == 1
