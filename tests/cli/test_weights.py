"""Schedules without flush on the command line: versions, staleness, and their limits."""

import json

import pytest

from pipeswift import codec
from pipeswift.schedules import pipedream


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(codec.to_json(pipedream(3, 12)))
    return path


def test_simulate_counts_versions_and_staleness(pipeswift):
    size = ("--pp", 4, "--microbatches", 16)
    out = pipeswift("simulate", "pipedream", *size).out
    assert "weights stash, an update every micro-batch; by stage: live versions 4 3 2 1" in " ".join(out.split())
    figures = json.loads(pipeswift("simulate", "pipedream", *size, "--weights", "vertical", "--json", "-").out)
    assert (figures["live_versions"], figures["staleness"]) == ([4] * 4, [3] * 4)
    trace = json.loads(pipeswift("simulate", "pipedream", *size, "--perfetto", "-").out)
    counted = [event["args"]["value"] for event in trace["traceEvents"] if event["name"] == "live versions of stage 0"]
    assert max(counted) == 4


def test_verify_keeps_the_limits(pipeswift, file):
    code, out, _ = pipeswift("verify", file, "--weights", "2bw", "--updates-every", 3, "--version-limit", 2)
    assert code == 0
    assert "weights 2bw, an update every 3 micro-batches; by stage: live versions 2 2 2; gradients at most 1 1 1" in out
    code, _, err = pipeswift("verify", file, "--version-limit", 2)
    assert (code, "rank 0 keeps 3 versions of stage 0, and the limit is 2" in err) == (1, True)
    code, _, err = pipeswift("verify", file, "--staleness-limit", 1)
    assert (code, "2 updates old when its gradient is applied, and the limit is 1" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("1f1b", "--weights", "stash"), "--weights 'stash' is for schedules that update within a step"),
        (
            ("pipedream", "--weights", "old"),
            "--weights 'old' is no weight policy: use one of stash, vertical, 2bw, none",
        ),
        (("pipedream", "--updates-every", 3), "--updates-every 3 does not divide the 8 micro-batches"),
    ],
)
def test_what_does_not_fit_is_explained(pipeswift, arguments, text):
    code, _, err = pipeswift("simulate", *arguments, "--pp", 2, "--microbatches", 8)
    assert (code, text in " ".join(err.split())) == (1, True)
