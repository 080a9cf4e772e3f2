"""A profile is data: it reads back as it was written, adds up over stages, and says what is wrong with a file."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from pipeswift.plan.profile import Profile, ProfileError
from tests.plan.profiles import layer, profile


@pytest.fixture
def three() -> Profile:
    return profile([layer("in", F=1), layer("block", F=2, bytes_=16), layer("head", F=4, I=3)])


def test_what_is_saved_loads_as_the_same(three, tmp_path):
    three.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == three


def test_arrays_have_one_entry_per_layer(three):
    assert three.seconds().tolist() == [[1, 2, 4], [1, 1, 3], [1, 1, 1], [2, 2, 4]]
    assert three.seconds(2).tolist() == (2 * three.seconds(1)).tolist()
    assert three.output_bytes(2).tolist() == [16, 32, 16]
    assert three.saved_bytes().tolist() == [80, 160, 80]
    assert three.parameter_bytes.tolist() == [100, 100, 100]
    assert three.optimizer_bytes.tolist() == [200, 200, 200]


def test_costs_add_up_over_a_stage(three):
    costs = three.costs([2, 1], size=2, latency=0.5)
    assert costs.seconds[:, :, 0].tolist() == [[6, 8], [4, 6], [4, 2], [8, 8]]
    assert costs.boundary_bytes.tolist() == [32]
    assert costs.latency == 0.5
    assert costs.memory.tolist() == [[480, 160], [-288, -96], [-192, -64], [-480, -160]]
    assert np.all(costs.memory[:3].sum(axis=0) == 0)


@pytest.mark.parametrize("layout", [[3, 0], [2, 2], [1, 1]])
def test_a_layout_of_other_layers_is_refused(three, layout):
    with pytest.raises(ProfileError, match=re.escape(f"layout = {layout}")):
        three.costs(layout)


def test_a_size_that_was_not_measured_is_refused(three):
    with pytest.raises(ProfileError, match=r"micro-batches of 1, 2 samples, and none of 3: .* --sizes 3"):
        three.seconds(3)


def _without_a_size(document):
    document["layers"][1]["I"]["median"].pop()


def _negative(document):
    document["layers"][2]["saved_bytes"][0] = -1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda document: document.pop("format"), 'is no profile: it lacks "format": "pipeswift-profile"'),
        (lambda document: document.update(version=7), "has version 7 of the format, and this PipeSwift reads 1"),
        (lambda document: document.update(sizes=[2, 1]), "ascending sizes such as"),
        (lambda document: document.update(layers=[]), "at least one layer"),
        (lambda document: document.update(extra=1), "extra"),
        (_without_a_size, "layers.1.I has 1 entries for 2 sizes"),
        (_negative, "layers.2.saved_bytes.0: Input should be greater than or equal to 0"),
    ],
)
def test_a_file_that_is_no_profile_is_explained(three, tmp_path, spoil, says):
    document = json.loads(three.to_json())
    spoil(document)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=re.escape(says)):
        Profile.load(file)


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"no profile .*nowhere\.json"):
        Profile.load(tmp_path / "nowhere.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ProfileError, match=r"text\.json is not JSON"):
        Profile.load(tmp_path / "text.json")


def test_reading_a_profile_does_not_load_torch():
    code = "import sys, pipeswift.plan.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
