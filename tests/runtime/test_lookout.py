"""What a rank's monitor is told, and when."""

from __future__ import annotations

from typing import Any

from pipeswift.ir import B, F
from pipeswift.policy import Monitor
from pipeswift.runtime.lookout import Lookout


class Silence:
    """Neighbours that tell nothing."""

    step = sent = 0

    def heard(self) -> tuple[()]:
        return ()


def test_the_last_pass_of_a_step_is_one_of_that_step():
    """So what it took for each second of its micro-batch's F is known; in the next step that F is forgotten."""
    silence: Any = Silence()
    lookout = Lookout(Monitor(0), silence)
    lookout.begin_step()
    lookout.end(F(0, 0), 1.0)
    lookout.look(0.0)
    lookout.end(B(0, 0), 3.0)
    lookout.begin_step()
    lookout.look(0.0)
    lookout.end(F(0, 0), 2.0)
    lookout.look(0.0)
    assert lookout.monitor.expected(B(0, 0)) == 6.0
