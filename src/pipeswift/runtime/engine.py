"""The way into autograd's engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """What `torch.autograd.backward(edges, gradients)` does, without what that looks at before, in Python.

    The engine itself checks shapes, dtypes and devices again. To a process that was asleep those looks cost a tenth of
    a millisecond, as much as all else that this package does for a pass.
    """
    _engine_run_backward(edges, tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
