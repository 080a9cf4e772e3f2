"""`pipeswift train` refuses what does not fit before it starts a process: one message, no traceback."""

import pytest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "train.stepz=5"], "Did you mean train.steps?"),
        (["--set", "model.blocks=1"], "fewer than the 4 stages"),
        (["--set", "pipeline.schedule=1f2b"], "Did you mean 1f1b?"),
        (["--set", "train.microbatches=0"], "greater than 0"),
        (["--data", "nowhere"], "data.path does not exist: nowhere"),
        (["--policy", "greedy"], "pipeline.policy"),
    ],
)
def test_bad_input_is_one_message(options, says, tmp_path, pipeswift):
    file = tmp_path / "settings.toml"
    file.write_text("")
    code, out, error = pipeswift("train", file, *options)
    assert (code, out) == (1, "")
    assert says in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_missing_settings_file_is_named(tmp_path, pipeswift):
    code, _, error = pipeswift("train", tmp_path / "nowhere.toml")
    assert code == 1
    assert "nowhere.toml" in error
