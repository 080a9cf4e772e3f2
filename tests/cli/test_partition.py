"""`pipeswift partition`: a cut from times or a profile, as a table and as JSON."""

import json

import pytest

from tests.plan.profiles import layer, profile

TIMES = ("--times", "1,1,1,1,1,3", "--bytes", "4,1,1,1,1,4")


@pytest.fixture
def written(pipeswift):
    """What the command writes as JSON."""

    def call(*arguments):
        code, out, err = pipeswift("partition", *arguments, "--json", "-")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def test_json(written):
    assert written(*TIMES, "--pp", 3) == {
        "stages": [[0, 3, 1], [3, 5, 1], [5, 6, 1]],
        "stage_seconds": [3, 2, 3],
        "stage_bytes": [6, 2, 4],
        "rank_seconds": [3, 2, 3],
        "rank_bytes": [6, 2, 4],
        "bottleneck": 3,
        "gap": 0,
        "layout": [3, 2, 1],
    }


def test_table(pipeswift):
    code, out, _ = pipeswift("partition", *TIMES, "--pp", 3, "--memory", 5)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "0-1", "0", "2", "5"] in rows
    assert ["2", "5", "2", "3", "4"] in rows
    assert out.endswith("layout 2,3,1; slowest stage 3 s, and no cut has a faster one\n")


def test_a_file_and_the_table(pipeswift, tmp_path):
    code, out, _ = pipeswift("partition", *TIMES, "--pp", 2, "--json", tmp_path / "cut.json")
    assert (code, "layout" in out) == (0, True)
    assert json.loads((tmp_path / "cut.json").read_text())["layout"] == [4, 2]


@pytest.mark.parametrize(
    ("options", "layout", "bottleneck"),
    [
        (("--speeds", "1,3"), [2, 4], 2),
        (("--chunks", 2), [2, 1, 2, 1], 4),
        (("--chunks", 2, "--placement", "vee"), [1, 2, 2, 1], 4),
        (("--schedule", "zb-v", "--microbatches", 4), [1, 2, 2, 1], 4),
        (("--schedule", "interleaved-1f1b", "--microbatches", 4, "--chunks", 2, "--objective", "stage"), None, 3),
        (("--layout", "5,1"), [5, 1], 5),
        (("--together", "0,3,4"), [3, 3], 5),
        (("--apart", 4), [5, 1], 5),
        (("--output-bytes", "0,0,0,9,0,0", "--bandwidth", 3), [5, 1], 5),
        (("--output-bytes", "1", "--bandwidth", "9,2", "--ranks-per-host", 1, "--transfers", "within"), [4, 2], 5),
        (("--replicate",), [4, 2], 4),
    ],
)
def test_options(written, options, layout, bottleneck):
    found = written(*TIMES, "--pp", 2, *options)
    assert found["bottleneck"] == bottleneck
    assert layout is None or found["layout"] == layout


def test_replicas(written):
    found = written("--times", "1,9", "--pp", 4, "--replicate")
    assert sum(replicas for *_, replicas in found["stages"]) == 4
    assert found["bottleneck"] == 2.5


def test_a_profile(written, tmp_path):
    file = tmp_path / "profile.json"
    profile([layer("embedding", F=2), layer("block"), layer("block"), layer("head", F=4)]).save(file)
    one = written("--profile", file, "--pp", 2)
    assert (one["layout"], one["stage_seconds"]) == ([2, 2], [7, 9])
    # Weights, gradients and optimizer state; two micro-batches in flight at the first stage, one at the second.
    assert one["stage_bytes"] == [2 * (100 + 100 + 200) + 2 * 160, 2 * (100 + 100 + 200) + 160]
    assert written("--profile", file, "--pp", 2, "--size", 2)["stage_seconds"] == [14, 18]
    replicated = written("--profile", file, "--pp", 2, "--replicate", "--memory", 1700)
    assert replicated["stages"] == [[0, 2, 1], [2, 4, 1]]
    assert replicated["stage_bytes"] == [one["stage_bytes"][0] + 200, one["stage_bytes"][1]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (TIMES, "--pp is missing"),
        (("--pp", 2), "--profile FILE or from --times"),
        ((*TIMES, "--pp", 2, "--profile", "x.json"), "give one of them"),
        (("--profile", "no.json", "--pp", 2), "there is no profile no.json"),
        (("--profile", "no.json", "--pp", 2, "--bytes", 1), "--bytes and --output-bytes go with --times"),
        ((*TIMES, "--pp", 2, "--size", 1), "--size chooses"),
        (("--times", "1,1", "--bytes", "1,2,3", "--pp", 2), "--bytes has 3 numbers for 2 --times"),
        (("--times", "1,x", "--pp", 2), "x is not a number"),
        ((*TIMES, "--pp", 7), "6 layers make at most 6 stages, and 7 are asked for"),
        ((*TIMES, "--pp", 3, "--memory", 3), "needs 4. Use 4 or more"),
        ((*TIMES, "--pp", 2, "--bandwidth", "1,2,3"), "--bandwidth takes one or two"),
        ((*TIMES, "--pp", 2, "--replicate", "--chunks", 2), "--replicate takes one stage per rank"),
        ((*TIMES, "--pp", 2, "--replicate", "--schedule", "1f1b", "--microbatches", 2), "--replicate is for"),
        ((*TIMES, "--pp", 2, "--replicate", "--layout", "3,3"), "--layout with --replicate"),
        ((*TIMES, "--pp", 2, "--schedule", "zb-v", "--microbatches", 4, "--placement", "loop"), "of its own"),
        ((*TIMES, "--pp", 2, "--schedule", "dualpipe", "--microbatches", 8), "has each stage on several ranks"),
        ((*TIMES, "--pp", 2, "--layout", "3,2"), "does not cut 6 layers"),
    ],
)
def test_what_does_not_fit_is_named(pipeswift, arguments, text):
    code, out, err = pipeswift("partition", *arguments)
    assert (code, out) == (1 if "is not a number" not in text else 2, "")
    assert text in err


def test_what_is_in_flight_with_chunks_depends_on_the_schedule(pipeswift, tmp_path):
    file = tmp_path / "profile.json"
    profile([layer("block")] * 4).save(file)
    assert "Add --schedule" in pipeswift("partition", "--profile", file, "--pp", 2, "--chunks", 2).err
