"""The virtual clock: the timeline of a schedule, or of any policy, without running it."""

from pipeswift.simulate.deadlock import Deadlock, Stuck
from pipeswift.simulate.events import run
from pipeswift.simulate.measured import measured_costs
from pipeswift.simulate.replay import replay
from pipeswift.simulate.tables import CostsMismatch

__all__ = ["CostsMismatch", "Deadlock", "Stuck", "measured_costs", "replay", "run"]
