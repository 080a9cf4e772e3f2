"""The partition: contiguous stages for ranks that differ, so that the slowest is as fast as can be."""

from pipeswift.plan.partition.held import in_flight, noam
from pipeswift.plan.partition.partition import Partition, Stage, evaluate
from pipeswift.plan.partition.problem import (
    Infeasible,
    Layers,
    Machine,
    Objective,
    PartitionError,
    Problem,
    Transfers,
)
from pipeswift.plan.partition.solve import layout, partition

__all__ = [
    "Infeasible",
    "Layers",
    "Machine",
    "Objective",
    "Partition",
    "PartitionError",
    "Problem",
    "Stage",
    "Transfers",
    "evaluate",
    "in_flight",
    "layout",
    "noam",
    "partition",
]
