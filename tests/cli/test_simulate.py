import json
import resource
import subprocess
import sys

import pytest

SIZE = ("--pp", 4, "--microbatches", 8)
KEYS = [
    "schedule",
    "pp",
    "microbatches",
    "chunks",
    "makespan",
    "longest_span",
    "bubble_rate_span",
    "bubble_rate_makespan",
    "peak_activations",
    "parameters",
]


@pytest.fixture
def figures(pipeswift):
    """The JSON of a simulation."""

    def simulate(*arguments):
        code, out, err = pipeswift("simulate", *arguments, "--json", "-")
        assert (code, err) == (0, "")
        return json.loads(out)

    return simulate


def test_a_picture_and_a_table(pipeswift):
    code, out, err = pipeswift("simulate", "1f1b", "--pp", 3, "--microbatches", 4, "-I", 0.5, "-W", 0.5)
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == [
        "1f1b, 3 ranks, 4 micro-batches",
        "rank 0 F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3",
        "rank 1 .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..",
        "rank 2 .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
        "       0                                12",
        " makespan                       12 s",
        " longest span                   12 s",
        " bubble by span              33.33 %",
        " bubble by makespan          33.33 %",
        " peak activations per rank     3 2 1",
        " parameters                      x 1",
    ]


def test_the_json_has_exactly_these_keys(figures):
    assert list(figures("1f1b", *SIZE)) == KEYS


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("m", "makespan"), [(1, 12), (2, 15)])
def test_fewer_micro_batches_than_ranks(figures, name, m, makespan):
    assert figures(name, "--pp", 4, "--microbatches", m)["makespan"] == makespan


@pytest.mark.parametrize(("name", "peaks"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("naive", [1, 1, 1, 1])])
def test_peak_activations(figures, name, peaks):
    assert figures(name, *SIZE)["peak_activations"] == peaks


def test_a_chunk_takes_its_share_of_time_and_memory(figures):
    found = figures("interleaved-1f1b", *SIZE, "--chunks", 2)
    assert found["makespan"] == 8 * 3 + 3 * 3 / 2
    assert found["peak_activations"] == [5.5, 4.5, 3.5, 2.5]


def test_what_a_woven_pair_costs(figures):
    size = ("--pp", 8, "--microbatches", 20)
    assert figures("dualpipe", *size)["makespan"] == figures("dualpipe", *size, "--overlap-cost", 3)["makespan"] == 66
    assert figures("dualpipe", *size, "--overlap-cost", 2)["makespan"] == 52
    assert figures("dualpipe-v", *size, "--overlap-cost", 2)["makespan"] == 52  # on as many ranks, chunks half as long
    assert [figures(name, *size)["parameters"] for name in ("1f1b", "dualpipe", "dualpipe-v")] == [1, 2, 1]


# Qi et al. 2024, tables 5 and 9: model, m, F, I, W, communication, bubble rate of 1F1B and of interleaved 1F1B.
PUBLISHED = [
    ("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055),
    ("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818),
    ("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443),
    ("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808),
    ("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628),
    ("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320),
]


@pytest.mark.parametrize(("model", "m", "F", "I", "W", "comm", "plain", "interleaved"), PUBLISHED)
def test_published_bubble_rates(figures, model, m, F, I, W, comm, plain, interleaved):  # noqa: E741
    costs = ("--pp", 8, "--microbatches", m, "-F", F, "-I", I, "-W", W, "--comm", comm)
    assert figures("1f1b", *costs)["bubble_rate_span"] == pytest.approx(plain, abs=5e-5)
    chunks = 3 if model == "1.5B" else 4
    found = figures("interleaved-1f1b", *costs, "--chunks", chunks)
    assert found["bubble_rate_span"] == pytest.approx(interleaved, abs=0.004)


def test_the_csv_simulates_as_what_it_came_from(pipeswift, figures, tmp_path):
    file = tmp_path / "mine.csv"
    assert pipeswift("simulate", "interleaved-1f1b", *SIZE, "--csv", file) == (0, "", "")
    named, read = figures("interleaved-1f1b", *SIZE), figures(file)
    assert read.pop("schedule") == "mine"
    assert named.pop("schedule") == "interleaved-1f1b"
    assert read == named


def test_the_csv_is_torchs_action_text(pipeswift):
    _, out, _ = pipeswift("simulate", "1f1b", "--pp", 2, "--microbatches", 2, "--csv", "-")
    assert out == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_several_files_at_once(pipeswift, tmp_path):
    files = {flag: tmp_path / f"out.{flag}" for flag in ("json", "csv", "svg", "png", "perfetto")}
    flags = [word for flag, file in files.items() for word in (f"--{flag}", file)]
    assert pipeswift("simulate", "1f1b", *SIZE, *flags) == (0, "", "")
    assert files["svg"].read_text().rstrip().endswith("</svg>")
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(files["perfetto"].read_text())["traceEvents"]) > 64
    assert list(json.loads(files["json"].read_text())) == KEYS


def test_a_picture_on_standard_output(pipeswift):
    code, out, _ = pipeswift("simulate", "1f1b", *SIZE, "--svg", "-")
    assert code == 0
    assert out.rstrip().endswith("</svg>")


def test_one_channel_per_direction_makes_messages_queue(figures):
    size = ("--pp", 2, "--microbatches", 4, "-F", 1)
    free = figures("gpipe", *size)
    slow = figures("gpipe", *size, "--channel-bandwidth", 10, "--boundary-bytes", 30)
    # Forward: 1, then four messages of 3 seconds one after the other, then the last F. Backward alike.
    assert free["makespan"] == 15
    assert slow["makespan"] == (1 + 4 * 3 + 1) + (2 + 4 * 3 + 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1c", "--pp", 4), "there is no schedule '1f1c'. Did you mean 1f1b?"),
        (("1f1b", "--microbatches", 4), "1f1b is a schedule of any size, and --pp is missing. Add --pp 4, say."),
        (("1f1b", "--pp", 4), "--microbatches is missing"),
        (("1f1b", "--pp", 0), "Invalid value for '--pp': 0 is not a whole number from 1 to 1e+09"),
        (("1f1b", "--pp", "four"), "Invalid value for '--pp': four is not a whole number"),
        (("1f1b", "--pp", 4, "--microbatches", 0), "Invalid value for '--microbatches': 0 is not"),
        (("1f1b", *SIZE, "--chunks", 0), "Invalid value for '--chunks': 0 is not"),
        (("1f1b", *SIZE, "--chunks", 2), "1f1b takes one chunk per rank: got --chunks 2"),
        (("interleaved-1f1b", "--pp", 4, "--microbatches", 6), "Use 4 or 8"),
        (("1f1b", *SIZE, "-F", "nan"), "Invalid value for '-F': nan is not a number from 1e-09 to 1e+09. Use 1, say."),
        (("1f1b", *SIZE, "-I", "-1"), "Invalid value for '-I': -1 is not a number"),
        (("1f1b", *SIZE, "-W", "0"), "Invalid value for '-W': 0 is not a number"),
        (("1f1b", *SIZE, "-W", "inf"), "Invalid value for '-W': inf is not a number"),
        (("1f1b", *SIZE, "--comm", "-1"), "Invalid value for '--comm': -1 is not a number from 0"),
        (("1f1b", *SIZE, "--memory-limit", "nan"), "Invalid value for '--memory-limit': nan is not"),
        (("1f1b", *SIZE, "--channel-bandwidth", 5), "go together. Add --boundary-bytes."),
        (("1f1b", *SIZE, "--boundary-bytes", 5), "go together. Add --channel-bandwidth."),
        (("1f1b", "--pp", 10**6, "--microbatches", 10**6), "1,000,000,000,000 forward passes, and the most is"),
        (("1f1b", *SIZE, "--json", "-", "--csv", "-"), "--csv and --json cannot share standard output"),
        (("1f1b", *SIZE, "--png", "-"), "--png - would put a picture's bytes on standard output"),
        (("1f1b", *SIZE, "--json", "/no/such/folder/x"), "--json cannot write /no/such/folder/x: No such file"),
        (("no-such.csv",), "there is no schedule file no-such.csv"),
    ],
)
def test_bad_input_is_one_message(pipeswift, arguments, message):
    code, out, err = pipeswift("simulate", *arguments)
    assert code in (1, 2)
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_a_limit_that_is_exceeded_names_rank_and_moment(pipeswift):
    code, out, err = pipeswift("simulate", "1f1b", *SIZE, "--memory-limit", 2, "--json", "-")
    assert (code, out) == (1, "")
    assert err == (
        "error: 1f1b does not fit --memory-limit 2: on rank 0, at 2 s, 0F2 brings the live activations to 3. "
        "Use --memory-limit 4 or more, or a schedule that needs less (pipeswift compare).\n"
    )


def test_a_limit_that_is_kept(figures):
    assert figures("1f1b", *SIZE, "--memory-limit", 4)["peak_activations"] == [4, 3, 2, 1]


def test_a_files_size_has_to_agree(pipeswift, tmp_path):
    file = tmp_path / "two.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    code, _, err = pipeswift("simulate", file, "--pp", 4)
    assert code == 1
    assert err == f"error: {file} has --pp 2: got --pp 4. Leave it out, or give 2.\n"
    assert pipeswift("simulate", file, "--pp", 2, "--microbatches", 1, "--chunks", 1, "--json", "-").code == 0


def test_a_file_that_cannot_run_is_refused(pipeswift, tmp_path):
    file = tmp_path / "bad.csv"
    file.write_text("0B0,0F0\n")
    code, out, err = pipeswift("simulate", file)
    assert (code, out) == (1, "")
    assert "rank 0 at 0B0 waits for 0F0" in err


def test_64_ranks_512_micro_batches_take_less_than_two_seconds():
    size = ("--pp", "64", "--microbatches", "512")
    command = [sys.executable, "-m", "pipeswift", "simulate", "1f1b", *size, "--json", "-"]
    subprocess.run(command, check=True, capture_output=True)  # fills Numba's cache
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


class TestPolicySwift:
    def test_without_swings_it_runs_the_schedule_and_says_by_which_rule(self, figures):
        followed, found = figures("zb-h1", *SIZE), figures("zb-h1", *SIZE, "--policy", "swift")
        rules = found.pop("rules")
        assert found == followed
        assert list(rules) == ["follow"]

    def test_the_table_tells_the_rules(self, pipeswift):
        out = pipeswift("simulate", "zb-h1", *SIZE, "--policy", "swift").out
        assert [line.split() for line in out.splitlines()[-3:] if "─" not in line] == [
            ["decisions", "by", "rule", "all", "by", "rank"],
            ["follow", "102", "25", "26", "26", "25"],
        ]

    def test_the_limit_is_a_number_of_slots_per_stage(self, figures):
        swift = ("--policy", "swift", "--memory-limit")
        assert figures("gpipe", *SIZE, *swift, 2.5)["peak_activations"] == [2, 2, 2, 2]
        assert max(figures("interleaved-1f1b", *SIZE, *swift, 3)["peak_activations"]) <= 3

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ("zb-h1", *SIZE, "--memory-limit", 0.5),
                "swift needs a slot per stage, and --memory-limit 0.5",
            ),
            (("dualpipe", *SIZE), "policy swift needs a schedule with one route: dualpipe has 2. Use policy follow"),
            (("dualpipe-v", *SIZE), "policy swift cannot part woven pairs: dualpipe-v has Overlaps. Use policy follow"),
        ],
    )
    def test_what_it_cannot_do_is_one_message(self, pipeswift, arguments, message):
        code, out, err = pipeswift("simulate", *arguments, "--policy", "swift")
        assert (code, out) == (1, "")
        assert message in err


class TestVariability:
    SWINGS = (*SIZE, "--variability", 0.4, "--seeds", 5)

    def test_the_json_has_a_makespan_and_a_lower_bound_per_seed(self, figures):
        found = figures("zb-h1", *self.SWINGS, "--comm", 0.02)
        assert len(found["makespans"]) == len(found["lower_bounds"]) == 5
        assert all(mine >= least for mine, least in zip(found["makespans"], found["lower_bounds"], strict=True))
        assert (found["policy"], found["variability"], found["pattern"], found["rules"]) == ("follow", 0.4, "iid", {})

    def test_schedules_and_policies_see_the_same_draws_and_more_seeds_go_on_where_fewer_end(self, figures):
        runs = [
            figures("1f1b", *self.SWINGS),
            figures("zb-h1", *self.SWINGS, "--policy", "swift"),
            figures("gpipe", *self.SWINGS[:-1], 7),
        ]
        bounds = [run["lower_bounds"][:5] for run in runs]
        assert bounds[1:] == bounds[:1] * 2

    def test_without_swing_all_draws_are_the_static_run(self, figures):
        still = figures("zb-h1", *SIZE, "--variability", 0, "--seeds", 3, "--policy", "swift")
        assert still["makespans"] == [figures("zb-h1", *SIZE)["makespan"]] * 3

    @pytest.mark.parametrize("pattern", ["iid", "ar1", "burst"])
    def test_patterns_draw_differently(self, figures, pattern):
        assert figures("1f1b", *self.SWINGS, "--pattern", pattern)["pattern"] == pattern

    def test_the_table_has_median_and_quartiles(self, pipeswift):
        code, out, _ = pipeswift("simulate", "zb-h1", *self.SWINGS, "--policy", "swift")
        assert code == 0
        lines = out.splitlines()
        assert lines[0] == "zb-h1, 4 ranks, 8 micro-batches, policy swift, iid, sigma 0.4"
        assert lines[1].split() == ["5", "seeds", "quartile", "median", "quartile"]
        assert [line.split()[0] for line in lines[3:6]] == ["makespan,", "lower", "over"]
        assert any(line.split()[:2] == ["rule", "advance"] for line in lines)

    def test_two_routes_have_a_bound_too(self, figures):
        found = figures("dualpipe", *self.SWINGS)
        assert all(mine >= least for mine, least in zip(found["makespans"], found["lower_bounds"], strict=True))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--seeds", 3), "--seeds goes with --variability, which is missing. Add --variability 0.4, say."),
            (("--pattern", "ar1"), "--pattern goes with --variability"),
            (("--variability", 4), "4 is not a number from 0 to 3"),
            (("--variability", 0.4, "--svg", "-"), "--svg shows one step, and --variability makes many"),
            (("--variability", 0.4, "--overlap-cost", 1), "--overlap-cost does not swing"),
            (("--variability", 0.4, "--memory-limit", 2), "does not fit --memory-limit 2"),
        ],
    )
    def test_what_does_not_go_together_is_one_message(self, pipeswift, arguments, message):
        code, out, err = pipeswift("simulate", "1f1b", *SIZE, *arguments)
        assert code in (1, 2)
        assert out == ""
        assert message in err
