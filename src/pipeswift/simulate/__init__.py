"""The virtual clock: the timeline of a schedule, or of any policy, without running it."""

from pipeswift.simulate.deadlock import Deadlock, Stuck
from pipeswift.simulate.events import run
from pipeswift.simulate.fit import fitted_latency
from pipeswift.simulate.joint import run_joint
from pipeswift.simulate.measured import measured_costs
from pipeswift.simulate.replay import replay
from pipeswift.simulate.tables import CostsMismatch
from pipeswift.simulate.variability import PATTERNS, Pattern, VariabilityError, factors, varied, work_bound
from pipeswift.simulate.watch import listeners

__all__ = [
    "PATTERNS",
    "CostsMismatch",
    "Deadlock",
    "Pattern",
    "Stuck",
    "VariabilityError",
    "factors",
    "fitted_latency",
    "listeners",
    "measured_costs",
    "replay",
    "run",
    "run_joint",
    "varied",
    "work_bound",
]
