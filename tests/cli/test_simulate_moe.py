import json

import pytest

FIGURES = ["chunks", "seconds_by_chunks", "elapsed", "ideal", "efficiency", "hidden", "spans"]


@pytest.fixture
def figures(pipeswift):
    """The JSON of a simulation."""

    def simulate(*arguments):
        code, out, err = pipeswift("simulate-moe", *arguments, "--json", "-")
        assert (code, err) == (0, "")
        return json.loads(out)

    return simulate


def test_a_row_per_lane_and_a_table(pipeswift, monkeypatch):
    monkeypatch.setenv("COLUMNS", "59")
    code, out, err = pipeswift(
        *("simulate-moe", "--experts", 1, "--exchange", 1, "--latency", 0, "--start", 0),
        *("--forward-chunks", 2, "--backward-chunks", 1),
    )
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()][:8] == [
        "forward, 2 chunks",
        "compute    ............E0----------E1----------............",
        "all-to-all D0----------D1----------C0----------C1----------",
        "           0                                              2",
        "backward, 1 chunk",
        "compute    ................E---------------W---------------",
        "all-to-all C---------------................D---------------",
        "           0                                              3",
    ]
    assert "seconds of one block by chunks: 2: 2" in out


def test_both_passes_come_with_their_figures(figures):
    found = figures()
    assert list(found) == ["forward", "backward"]
    assert all(list(figures) == FIGURES for figures in found.values())
    forward = found["forward"]
    assert forward["elapsed"] == pytest.approx(forward["ideal"], rel=0.01)
    assert forward["seconds_by_chunks"]["forward"][str(forward["chunks"]["forward"])] == forward["elapsed"]
    assert {span["lane"] for span in forward["spans"]} == {"compute", "all-to-all"}


def test_two_passes_woven_hide_more_than_each_alone(figures):
    found = figures("--blocks", 4, "--exchange", 0.5, "--overlap", "--forward-chunks", 1, "--backward-chunks", 1)
    assert found["overlap"]["elapsed"] < 0.8 * (found["forward"]["elapsed"] + found["backward"]["elapsed"])
    assert found["overlap"]["hidden"] > 0.9 > found["backward"]["hidden"]


def test_high_latency_chooses_one_chunk(figures):
    found = figures("--latency", 2)
    assert found["forward"]["chunks"] == {"forward": 1}
    assert found["backward"]["chunks"] == {"backward": 1}


def test_local_tokens_go_first(figures):
    first = next(span for span in figures("--local", 0.25)["forward"]["spans"] if "experts" in span["work"])
    assert first["work"] == "0F1 experts[local]"


def test_a_link_and_bytes_stand_for_seconds(figures):
    costs = ("--experts", 0.004, "--start", 2e-5)
    fast, slow = (figures(*costs, "--link", name, "--sent", 2e8) for name in ("nvlink", "ethernet"))
    assert fast["forward"]["elapsed"] < slow["forward"]["elapsed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--link", "wire", "--sent", 1), "there is no link --link wire. Use nvlink, infiniband, ethernet, or"),
        (("--link", "nvlink"), "--link and --sent go together. Add --sent."),
        (("--sent", 5), "--link and --sent go together. Add --link."),
        (("--link", "nvlink", "--sent", 1, "--latency", 1), "Give the one pair or the other."),
        (("--backward-chunks", 9), "--backward-chunks: chunks are groups of a rank's 8 experts: got chunks=9"),
        (("--local", 2), "2 is not a number from 0 to 1."),
    ],
)
def test_what_does_not_fit_is_refused(pipeswift, arguments, message):
    code, out, err = pipeswift("simulate-moe", *arguments)
    assert code != 0
    assert out == ""
    assert message in err
