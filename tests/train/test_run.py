"""A whole run: what it leaves in its folder, and that it computes the same however many processes share it."""

import csv
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeswift.plan.profile import Profile
from pipeswift.train import worker
from pipeswift.train.config import load
from pipeswift.train.cut import cut_by
from pipeswift.train.folder import COLUMNS

SETTINGS = """
[model]
blocks = 2
width = 16
heads = 2
context = 32
[train]
steps = 4
batch = 8
microbatches = 4
accumulate = 2
warmup = 1
eval_every = 2
eval_batches = 1
"""


@pytest.fixture
def settings(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text(f"The quick brown fox jumps over {number} lazy dogs. " * 40)
    file = tmp_path / "settings.toml"
    file.write_text(
        f"{SETTINGS}[data]\npath = {json.dumps(str(text))}\n[run]\nfolder = {json.dumps(str(tmp_path / 'run'))}\n"
    )
    return file


def command(settings, *options, launcher=()):
    return [sys.executable, "-m", *launcher, "pipeswift", "train", str(settings), *options]


def finish(words, timeout=240):
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)


def metrics(folder: Path):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def exact(rows):
    """What must not depend on who computes it."""
    return [[row[column] for column in ("step", "loss", "held_out", "learning_rate", "gradient_norm")] for row in rows]


def test_a_run_of_one_process(settings, tmp_path, capfd):
    worker.run(load(settings, ["pipeline.pp=1"]))
    rows = metrics(tmp_path / "run")
    assert tuple(rows[0]) == COLUMNS
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [bool(row["held_out"]) for row in rows] == [True, False, True, False, True]
    assert float(rows[-1]["held_out"]) < float(rows[0]["held_out"])
    assert "Held-out loss" in capfd.readouterr().out


@pytest.mark.timeout(300)
def test_replicas_share_the_batch_and_train_as_one(settings, tmp_path):
    alone = load(settings, ["pipeline.pp=1"])
    worker.run(alone)
    done = finish(
        command(settings, "--set", "pipeline.pp=1", "--set", "pipeline.dp=2", "--set", "train.microbatches=2")
    )
    assert done.returncode == 0, done.stderr
    rows, expected = metrics(tmp_path / "run-2"), metrics(tmp_path / "run")
    for row, other in zip(rows, expected, strict=True):
        for column in ("held_out", "loss", "gradient_norm"):
            if other[column]:
                assert float(row[column]) == pytest.approx(float(other[column]), rel=1e-4)
    events = json.loads((tmp_path / "run-2" / "trace.json").read_text())["traceEvents"]
    assert any(event.get("args", {}).get("name") == "all-to-all" for event in events), "no lane of reductions"
    for words in ("2 ranks of 1 thread", "share of the step", "reducing", "rank 0, replica 1"):
        assert words in done.stdout
    assert "replica 1" in (tmp_path / "run-2" / "timeline.svg").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_swift_over_expert_groups_computes_what_the_schedule_does(settings, tmp_path):
    shared_out = ["model.experts=4", "pipeline.pp=2", "pipeline.dp=2", "pipeline.ep=2", "pipeline.expert_chunks=1"]
    for policy in ("follow", "swift"):
        steps = ["train.steps=24", "train.accumulate=1"]  # the trace is of one of the last 20
        overrides = [*shared_out, *steps, "pipeline.schedule=zb-h1", f"pipeline.policy={policy}"]
        done = finish(command(settings, *(word for one in overrides for word in ("--set", one))))
        assert done.returncode == 0, done.stderr
    assert "agreement messages" in (tmp_path / "run-2" / "trace.json").read_text()
    assert exact(metrics(tmp_path / "run")) == exact(metrics(tmp_path / "run-2"))


@pytest.mark.timeout(300)
def test_two_processes_compute_what_one_does_and_leave_the_same_files(settings, tmp_path):
    done = finish(command(settings, "--set", "pipeline.pp=2"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    files = {"config.toml", "profile.json", "metrics.csv", "trace.json", "timeline.svg"}
    assert {file.name for file in folder.iterdir()} == files
    used = load(folder / "config.toml")
    assert used.pipeline.pp == 2
    assert used.pipeline.partition == cut_by(Profile.load(folder / "profile.json"), used.build_schedule(), 1).layout
    assert all(len(row["utilization"].split()) == 2 for row in metrics(folder)[1:])
    spans = [event for event in json.loads((folder / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * (2 * 4 * 2)  # predicted and measured: 2 ranks, 4 micro-batches, F and B
    assert "predicted" in (folder / "timeline.svg").read_text()
    assert f"Layers per stage: {' '.join(map(str, used.pipeline.partition))}, cut by profile.json." in done.stdout
    for words in (r"makespan +\d", r"bubble by span +\d", r"peak activations per rank +2 1 +2 1", "shared"):
        assert re.search(words, done.stdout), done.stdout

    worker.run(load(settings, ["pipeline.pp=1"]))
    assert exact(metrics(tmp_path / "run-2")) == exact(metrics(folder))


@pytest.mark.timeout(300)
def test_under_torchrun_the_same_command_is_one_rank(settings, tmp_path):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = finish(command(settings, "--set", "pipeline.pp=2", launcher=launcher))
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "run")) == 5
    assert done.stdout.count("Held-out loss") == 1


@pytest.mark.timeout(300)
def test_a_failing_rank_ends_the_run_with_one_message(settings, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("hi")
    done = finish(command(settings, "--set", "pipeline.pp=2", "--data", str(short)))
    assert done.returncode == 1
    assert re.fullmatch(r"error: rank \d failed: data\.path .*short\.txt has too little text.*\n", done.stderr)


@pytest.mark.timeout(300)
def test_an_interrupted_run_leaves_no_process(settings):
    words = command(settings, "--set", "pipeline.pp=2", "--set", "train.steps=100000")
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout
    assert "held-out" in run.stdout.readline()
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    assert len(children) >= 2
    handles = [os.pidfd_open(int(child)) for child in children]
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert errors == ""
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], 60)
        os.close(handle)
        assert ended
