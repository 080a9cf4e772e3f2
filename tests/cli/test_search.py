import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = ("--pp", 4, "--microbatches", 12)
TIMES = ("-F", 10, "-I", 11, "-W", 8, "--comm", 1)


@pytest.fixture
def found(pipeswift):
    """The JSON of a search that takes a second at most."""

    def search(*arguments):
        code, out, err = pipeswift("search", *arguments, "--time-limit", 1, "--json", "-")
        assert (code, err) == (0, "")
        return json.loads(out)

    return search


def test_a_picture_a_table_and_a_proof(pipeswift):
    code, out, err = pipeswift("search", "--pp", 2, "--microbatches", 3, "--memory-limit", 2)
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[:4] == [
        "searched, 2 ranks, 3 micro-batches",
        "rank 0 F0 F1 .. I0 W0 F2 I1 W1 I2 W2",
        "rank 1 .. F0 I0 F1 I1 W0 F2 I2 W1 W2",
        "       0                          10",
    ]
    assert lines[-2].startswith("span 10 s, lower bound 10 s: optimal; by zb-h1, ")
    assert lines[-1] == "peak memory 2, limit 2"


def test_the_json_has_the_figures_of_simulate_and_its_own(found, pipeswift):
    one = found(*SIZE, *TIMES, "--memory-limit", 4)
    simulated = json.loads(pipeswift("simulate", "zb-h1", *SIZE, *TIMES, "--json", "-").out)
    own = ["lower_bound", "gap", "optimal", "method", "seconds"]
    assert list(one)[: len(simulated) + len(own)] == [*simulated, *own]
    assert one["longest_span"] == one["lower_bound"] == 399
    assert (one["gap"], one["optimal"], one["pp"], one["microbatches"]) == (0, True, 4, 12)
    assert max(one["peak_activations"]) == 4
    assert one["provenance"]["peak_memory"] == one["peak_activations"]


@pytest.mark.parametrize(("limit", "makespan"), [(4, 399), (8, 381)])
def test_the_makespan_as_objective(found, limit, makespan):
    one = found(*SIZE, *TIMES, "--memory-limit", limit, "--objective", "makespan")
    assert (one["makespan"], one["optimal"]) == (makespan, True)


def test_memory_in_bytes(found):
    held, kept = 1236271104, 452984832
    one = found(*SIZE, *TIMES, "--memory", f"{held},{kept - held},{-kept}", "--memory-limit", 6 * held)
    assert max(one["provenance"]["peak_memory"]) <= 6 * held


@pytest.mark.parametrize("suffix", ["csv", "json"])
@pytest.mark.parametrize("placement", [(), ("--chunks", 2), ("--chunks", 2, "--placement", "loop")])
def test_other_commands_take_the_file(pipeswift, found, tmp_path, monkeypatch, suffix, placement):
    monkeypatch.chdir(tmp_path)
    file = Path(f"mine.{suffix}")
    code, _, err = pipeswift(
        "search", *SIZE, *TIMES, *placement, "--memory-limit", 6, "--time-limit", 1, f"--{suffix}", file
    )
    assert (code, err) == (0, "")
    assert pipeswift("verify", file, "--memory-limit", 6).code == 0
    code, out, _ = pipeswift("simulate", file, *TIMES, "--memory-limit", 6, "--json", "-")
    assert code == 0
    figures = json.loads(out)
    assert figures["chunks"] == (2 if placement else 1)
    if suffix == "json":
        written = json.loads(file.read_text())
        assert {key: written[key] for key in figures} == figures
    code, out, _ = pipeswift("compare", file, "zb-h1", *SIZE, *TIMES)
    assert code == 0
    assert str(file) in out


def test_variability(found):
    one = found(*SIZE, *TIMES, "--memory-limit", 5, "--variability", 0.3)
    assert one["provenance"]["variability"] == 0.3
    assert not one["optimal"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--pp'"),
        (("--pp", 4), "Missing option '--microbatches'"),
        (("--pp", 0, "--microbatches", 4), "Invalid value for '--pp': 0 is not a whole number from 1"),
        ((*SIZE, "--memory-limit", 0.5), "the memory limit 0.5 is too low: rank 0 needs 1 for a single micro-batch."),
        ((*SIZE, "--memory-limit", "nan"), "Invalid value for '--memory-limit': nan is not a number"),
        ((*SIZE, "--memory", "1,0"), "Invalid value for '--memory': 1,0 is not three numbers with commas between."),
        ((*SIZE, "--memory", "1,0,-2"), "must sum to 0, or it would grow or shrink with every micro-batch: got 1,0,-2"),
        ((*SIZE, "--memory", "nan,0,-1"), "Invalid value for '--memory': nan,0,-1 is not three numbers"),
        ((*SIZE, "--objective", "speed"), "'speed' is not one of 'span', 'makespan'"),
        ((*SIZE, "--time-limit", 0), "Invalid value for '--time-limit': 0 is not a number from 0.01"),
        ((*SIZE, "--variability", -1), "Invalid value for '--variability': -1 is not a number from 0 to 3"),
        ((*SIZE, "--csv", "-", "--json", "-"), "--csv and --json cannot share standard output"),
        ((*SIZE, "--csv", "/no/such/folder/x"), "--csv cannot write /no/such/folder/x: No such file"),
        ((*SIZE, "--costs", "no-such.json"), "there is no costs file no-such.json. Check the path."),
        ((*SIZE, "--costs", "x.json", "-F", 2), "-F and --costs both say what passes cost. Leave one out."),
        (("--pp", 10**5, "--microbatches", 10**5), "10,000,000,000 forward passes, and the most is 16,777,216"),
    ],
)
def test_bad_input_is_one_message(pipeswift, arguments, message):
    code, out, err = pipeswift("search", *arguments)
    assert code in (1, 2)
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_a_terminal_sees_progress_and_ctrl_c_takes_the_best():
    """Regression guard: the solver's own handler of Ctrl-C must not take Python's place for good."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "pipeswift", "search", "--pp", "8", "--microbatches", "64", "--comm", "0.535"]
    command += ["-F", "29.935", "-I", "29.621", "-W", "19.388", "--memory", "299,-171,-128", "--memory-limit", "4784"]
    command += ["--time-limit", "3600", "--json", "-"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, text=True)
    os.close(follower)
    seen = b""
    while b"Ctrl-C takes it" not in seen:
        seen += os.read(leader, 4096)
    process.send_signal(signal.SIGINT)
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()  # where it did not heed Ctrl-C
        os.close(leader)
    assert process.returncode == 0
    assert json.loads(out)["seconds"] < 3600
