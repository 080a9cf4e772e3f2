"""The way into autograd's engine."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(edges: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    """What `torch.autograd.backward(edges, gradients)` does, without what that looks at before, in Python.

    A gradient must have its output's shape: one that only expands to it is summed without a word. To a process that was
    asleep those looks cost a tenth of a millisecond, as much as all else that this package does for a pass.
    """
    _engine_run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
