"""Calibration: means and swings that a static run has shown."""

import numpy as np
import pytest

from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.policy import calibrate
from pipeswift.schedules import build
from pipeswift.simulate import factors, replay, varied


def test_equal_times_do_not_swing():
    found = calibrate(replay(build("zb-h1", 2, 4), Costs.uniform(2, F=1.0, I=1.5, W=0.5)))
    assert found.seconds == {(stage, op): s for stage in range(2) for op, s in ((Op.F, 1.0), (Op.I, 1.5), (Op.W, 0.5))}
    assert found.swing == {0: 0.0, 1: 0.0}


def test_each_stage_has_its_own_swing():
    swings = np.array([[1.0, 1.0, 1.0, 1.0], [0.5, 1.5, 0.5, 1.5]])
    found = calibrate(replay(build("1f1b", 2, 4), varied(Costs.uniform(2), swings)))
    assert found.swing == pytest.approx({0: 0.0, 1: 0.5})
    assert found.seconds[1, Op.B] == pytest.approx(2.0)


def test_the_swing_is_the_sigma_of_the_draws():
    costs = varied(Costs.uniform(2), factors(0, 2, 400, 0.2))
    assert calibrate(replay(build("gpipe", 2, 400), costs)).swing == pytest.approx({0: 0.2, 1: 0.2}, rel=0.1)
