"""Costs files, as `pipeswift search --costs` reads them and its JSON holds them."""

import json

import pytest

from pipeswift import codec

SIZE = ("--pp", 4, "--microbatches", 12)


@pytest.fixture
def found(pipeswift):
    """The JSON of a search that takes a second at most."""

    def search(*arguments):
        code, out, err = pipeswift("search", *arguments, "--time-limit", 1, "--json", "-")
        assert (code, err) == (0, "")
        return json.loads(out)

    return search


def test_costs_by_stage_from_a_file_and_back(found, tmp_path):
    file = tmp_path / "costs.json"
    heavy = [11.3, 11.3, 11.3, 15.82]
    file.write_text(json.dumps({"F": heavy, "I": heavy, "W": 8, "comm": 0.4, "memory": {"F": 2, "I": -1, "W": -1}}))
    one = found(*SIZE, "--costs", file, "--memory-limit", 12)
    assert one["costs"]["F"] == heavy
    assert one["costs"]["B"] == [time + 8 for time in heavy]
    assert one["lower_bound"] >= 12 * (2 * heavy[-1] + 8) * (1 - 1e-9)
    again = tmp_path / "found.json"
    again.write_text(json.dumps(one))
    assert found(*SIZE, "--costs", again, "--memory-limit", 12)["costs"] == one["costs"]
    assert codec.load(again).num_ranks == 4


def test_costs_by_micro_batch_and_by_link(found, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"F": [[1, 2], [3, 1]], "I": [1, 2], "W": 1, "comm": [[0, 0.5], [0.25, 0]]}))
    one = found("--pp", 2, "--microbatches", 2, "--costs", file)
    assert one["costs"]["F"] == [[1, 2], [3, 1]]
    assert one["costs"]["I"] == [[1, 1], [2, 2]]
    assert one["costs"]["comm"] == [[0, 0.5], [0.25, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read the costs file"),
        ("[1]", "holds no costs"),
        ('{"F": 1, "I": 1}', "has no 'W'. Give one number, or one per stage."),
        ('{"F": [1, 2], "I": 1, "W": 1}', "'F' is [1, 2]. It has to be one number or 4 numbers or 4 x 12 numbers."),
        ('{"F": "x", "I": 1, "W": 1}', "'F' is \"x\". It has to be one number"),
        ('{"F": 1, "I": -1, "W": 1}', "a time is negative"),
        (
            '{"F": 1, "I": 1, "W": 1, "latency": 1}',
            "there is no 'latency' in costs. They have B, F, I, W, comm, memory.",
        ),
        ('{"F": 1, "I": 1, "W": 1, "memory": 1}', '"memory" has to be such as'),
        ('{"F": 1, "I": 1, "W": 1, "memory": {"F": 1, "I": 0}}', "has no 'W'"),
    ],
)
def test_a_costs_file_that_does_not_fit(pipeswift, tmp_path, text, message):
    file = tmp_path / "costs.json"
    file.write_text(text)
    code, out, err = pipeswift("search", *SIZE, "--costs", file)
    assert (code, out) == (1, "")
    assert message in err
