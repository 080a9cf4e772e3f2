"""Real processes: a pipeline's stages, channels and executor over torch.distributed."""

from pipeswift.runtime.async_optimizer import AsyncOptimizer, Update
from pipeswift.runtime.optimizer import Optimizer
from pipeswift.runtime.peers import Disagreement, MeshError, Peers, init_mesh
from pipeswift.runtime.pipeline import Pipeline
from pipeswift.runtime.result import Result

__all__ = [
    "AsyncOptimizer",
    "Disagreement",
    "MeshError",
    "Optimizer",
    "Peers",
    "Pipeline",
    "Result",
    "Update",
    "init_mesh",
]
