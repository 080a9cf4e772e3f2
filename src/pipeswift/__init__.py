"""PipeSwift: pipeline-parallel training for PyTorch. Plan it, run it, see it."""

__version__ = "0.1.0"
