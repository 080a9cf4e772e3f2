"""Real processes: a pipeline's stages, channels and executor over torch.distributed."""

from pipeswift.runtime.optimizer import Optimizer
from pipeswift.runtime.peers import Disagreement, MeshError, Peers, init_mesh
from pipeswift.runtime.pipeline import Pipeline, Result

__all__ = ["Disagreement", "MeshError", "Optimizer", "Peers", "Pipeline", "Result", "init_mesh"]
