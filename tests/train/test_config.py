"""Settings are checked before anything starts, and an error says which, what it is, the rule, and a way out."""

import re
import subprocess
import sys

import pytest

from pipeswift import codec
from pipeswift.schedules import build
from pipeswift.train.config import Config, ConfigError, dumps, load, parse


def refusal(tmp_path, text, *overrides):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return str(caught.value)


def test_an_empty_file_is_a_valid_one(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("")
    assert load(file) == Config()


def test_what_is_written_down_reads_back(tmp_path):
    config = parse(
        {
            "data": {"path": 'a "quoted" \\ näme 🚀'},
            "train": {"steps": 3},
            "pipeline": {"chunks": None, "partition": [2, 1, 1, 2]},
        }
    )
    file = tmp_path / "config.toml"
    file.write_text(dumps(config), encoding="utf-8")
    assert load(file) == config


def test_overrides_lie_over_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("[train]\nsteps = 7\nlr = 0.1\n")
    config = load(file, ["train.steps=5", "pipeline.schedule=gpipe", "run.folder='else where'"])
    assert (config.train.steps, config.train.lr, config.pipeline.schedule) == (5, 0.1, "gpipe")
    assert str(config.run.folder) == "else where"


def test_a_schedule_from_a_file(tmp_path):
    file = tmp_path / "mine.csv"
    codec.save(build("zb-h2", 4, 8), file)
    config = parse({"pipeline": {"schedule": str(file)}})
    assert config.build_schedule().orders == build("zb-h2", 4, 8).orders


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pipeline": {"pp": 2}}, "pipeline.pp = 2, but the schedule in {} has 4: use pipeline.pp = 4"),
        ({"train": {"microbatches": 4}}, "train.microbatches = 4, but the schedule in {} has 8: use"),
        ({"pipeline": {"chunks": 2}}, "pipeline.chunks = 2, but the schedule in {} has 1: use"),
    ],
)
def test_a_schedule_from_a_file_has_to_be_of_the_right_size(tmp_path, settings, says):
    file = tmp_path / "mine.csv"
    codec.save(build("zb-h2", 4, 8), file)
    settings["pipeline"] = {"schedule": str(file)} | settings.get("pipeline", {})
    with pytest.raises(ConfigError, match=re.escape(says.format(file))):
        parse(settings)


@pytest.mark.parametrize(
    ("text", "says"), [("0B0,0F0", "cannot run"), ("0X0", "not an action"), (None, "no schedule file")]
)
def test_a_schedule_file_that_will_not_do(tmp_path, text, says):
    file = tmp_path / "mine.csv"
    if text:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"pipeline.schedule: .*{says}"):
        parse({"pipeline": {"schedule": str(file), "pp": 1}, "train": {"microbatches": 1}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nstepz = 3", ["no setting train.stepz", "Did you mean train.steps?"]),
        ("[model]\nsteps = 3", ["no setting model.steps", "Did you mean train.steps?"]),
        ("[modle]\nwidth = 3", ["no section modle", "Did you mean model?"]),
        ("[train]\nsteps = -4", ["train.steps = -4", "greater than 0", "for example train.steps ="]),
        ("[train]\nsteps = '4'", ['train.steps = "4"', "valid integer"]),
        ("[train]\nlr = nan", ["train.lr", "finite"]),
        ("[data]\npath = 3", ["data.path = 3", "path"]),
        ("model = 3", ["model = 3"]),
        ("[pipeline]\npolicy = 'slow'", ["pipeline.policy", "'follow', 'swift' or 'replan'"]),
        ("[pipeline]\nin_flight = 3", ["pipeline.in_flight = 3", 'pipeline.policy = "swift"']),
        (
            "[pipeline]\npolicy = 'swift'\nschedule = 'dualpipe'\n[train]\nmicrobatches = 8",
            ['pipeline.policy = "swift"', "one route: dualpipe has 2"],
        ),
        ("[pipeline]\nthreads = 100000000", ["pipeline.threads = 100000000", "1024"]),  # was a segmentation fault
        ("[train]\nbatch = 25", ["train.batch = 25", "1 x 8", "Use train.batch = 24"]),
        ("[train]\nbatch = 8\n[pipeline]\ndp = 3", ["pipeline.dp x", "3 x 1 x 8", "Use train.batch = 24"]),
        ("[train]\nbatch = 8\naccumulate = 3", ["train.batch = 8", "3 x 8", "Use train.batch = 24"]),
        ("[model]\nheads = 7", ["model.width", "2 x model.heads = 14"]),
        ("[model]\nblocks = 1", ["model.blocks = 1", "3 layers", "4 stages", "model.blocks = 2"]),
        ("[pipeline]\nschedule = '1f2b'", ["1f2b", "Did you mean 1f1b?"]),
        (
            "[train]\nbatch = 24\nmicrobatches = 6\n[pipeline]\nschedule = 'interleaved-1f1b'",
            ["train.microbatches 6", "multiple of pipeline.pp", "Use 4 or 8"],
        ),
        ("[pipeline]\npartition = 'odd'", ['pipeline.partition = "odd"', '"profile", "even", or the number of layers']),
        ("[pipeline]\npartition = [2, 0]", ["pipeline.partition = [2, 0]", "such as [2, 1, 1, 2]"]),
        ("[pipeline]\npartition = [2, 4]", ["[2, 4] does not share out 6 layers", "over 4 stages", "[1, 1, 1, 3]"]),
        ("[model]\nvocabulary = 255", ["model.vocabulary = 255", "greater than or equal to 256"]),
        (
            "[train]\nbatch = 24\n[pipeline]\ndp = 3\nep = 2",
            ["pipeline.ep = 2", "Use pipeline.dp = 4"],
        ),
        ("[model]\nexperts = 3\n[pipeline]\ndp = 2\nep = 2", ["model.experts = 3", "ep = 2", "Use model.experts = 4"]),
        ('[model]\nskew = "fixed"', ['model.skew = "fixed"', "model.experts = 0", "use model.experts = 4"]),
        ('[model]\nexperts = 4\nskew = "wild"', ["model.skew", "wild", "bursty"]),
        ("[model]\nskew_strength = 3.0", ["model.skew_strength = 3.0", 'set model.skew = "fixed"']),
        ("[model]\nexperts = 2\ntop_k = 3", ["model.top_k = 3", "model.experts = 2", "Use model.top_k = 1"]),
        ("[model]\nexperts = 4\n[pipeline]\nexpert_chunks = 5", ["expert_chunks = 5", "the 4 experts", "= 4 at most"]),
        ("[pipeline]\nexpert_chunks = 0", ["pipeline.expert_chunks = 0", '"auto", or a number of chunks, such as 2']),
        ("[train\n", ["is not TOML"]),
    ],
)
def test_a_setting_that_does_not_fit_is_explained(tmp_path, text, says):
    message = refusal(tmp_path, text)
    assert [part for part in says if part not in message] == [], message


def test_every_wrong_setting_is_named_at_once(tmp_path):
    message = refusal(tmp_path, "[train]\nsteps = 0\nbatch = 0\n")
    assert "train.steps" in message
    assert "train.batch" in message


@pytest.mark.parametrize("override", ["steps=5", "train.steps", "=", "train.=4"])
def test_a_malformed_override_is_quoted(tmp_path, override):
    assert f"--set {override} is not a setting" in refusal(tmp_path, "", override)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no settings file .*nowhere\.toml"):
        load(tmp_path / "nowhere.toml")


def test_ranks_must_agree_on_everything_but_paths():
    agreement = Config().agreement()
    assert agreement["train.seed"] == 0
    assert agreement["pipeline.schedule"] == "1f1b"
    assert not [name for name in agreement if name.startswith(("data.", "run."))]


def test_checking_settings_does_not_load_torch():
    code = "import sys, pipeswift.train.config, pipeswift.train.data, pipeswift.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_settings_of_schedules_without_flush(tmp_path):
    asynchronous = ["pipeline.schedule=pipedream", "pipeline.pp=2"]
    file = tmp_path / "settings.toml"
    file.write_text("")
    config = load(file, [*asynchronous, "pipeline.weights=2bw", "pipeline.updates_every=2"])
    assert (config.pipeline.weights, config.pipeline.updates_every) == ("2bw", 2)
    for override, text in (
        ("pipeline.updates_every=3", "updates_every = 3 does not divide the 8 micro-batches"),
        ("pipeline.weights=2bw", "2bw needs at least as many micro-batches per update as ranks"),
        ("pipeline.dp=2", "pipeline.dp = 2 replicas reduce gradients at a flush, and pipedream has none: use"),
        ("train.accumulate=2", "train.accumulate = 2 adds up gradients over flushes, and pipedream has none"),
    ):
        assert text in refusal(tmp_path, "", *asynchronous, override)
    for override in ("pipeline.weights=stash", "pipeline.updates_every=2", "train.staleness_correction=5"):
        setting = override.partition("=")[0]
        assert f"{setting} = " in (text := refusal(tmp_path, "", override))
        assert 'is for schedules without flush: leave it out, or use pipeline.schedule = "pipedream"' in text
