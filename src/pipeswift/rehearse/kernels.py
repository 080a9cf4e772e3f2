"""Emulated kernels: layers whose F, I and W each last a set time without using a core.

A kernel lasts from its first line to its last, like a real one, and sleeps for what is left of its time. So many ranks
fit on few cores, and a measured timeline shows what the runtime itself costs.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op
from pipeswift.runtime.backward import halves, splitting
from pipeswift.runtime.rules import Rule

PR_SET_TIMERSLACK = 29

_thread = threading.local()


class Kernel(NamedTuple):
    """One kernel that ran; seconds on `time.perf_counter`."""

    op: Op
    start: float
    end: float


Clock = list[Kernel]  # kernels in the order they ended


class Emulated(nn.Module):
    """y = x * w with w of shape (width,): exact gradients for next to no work, and F, I, W seconds of sleep.

    x, y: floating point, shape (..., width). F is spent in forward, I where the gradient of x is made and W where that
    of w is. I and W are nodes of their own in the autograd graph, so a split backward can run them apart; a fused
    one takes I + W. Where x needs no gradient, as on a first stage, I is spent all the same.
    clock: a list to which each kernel adds its `Kernel` record.
    Raises PipeSwiftError for a negative duration or a width below 1.
    """

    def __init__(
        self,
        width: int,
        *,
        F: float = 0.01,
        I: float = 0.01,  # noqa: E741
        W: float = 0.01,
        clock: Clock | None = None,
    ):
        super().__init__()
        if width < 1:
            raise PipeSwiftError(f"Emulated needs a width of at least 1: got width={width}; 8 will do.")
        for name, seconds in (("F", F), ("I", I), ("W", W)):
            if seconds < 0:
                raise PipeSwiftError(
                    f"Emulated takes durations in seconds, 0 or more: got {name}={seconds}; 0.01 is usual."
                )
        self.weight = nn.Parameter(torch.empty(width).uniform_(0.5, 1.5))
        self.seconds = {Op.F: F, Op.I: I, Op.W: W}
        self.clock = clock
        self._rule = Rule(torch.mul, _input_gradient, self._weight_gradient)

    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        product = halves(self._rule, x, self.weight) if splitting() else x * _SpendsW.apply(self.weight, self)
        y = _SpendsI.apply(product, self)
        self.spend(Op.F, start)
        return y

    def _weight_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor]:
        start = time.perf_counter()
        made = (gradient * x).sum_to_size(weight.shape)
        self.spend(Op.W, start)
        return (made,)

    def spend(self, op: Op, start: float) -> None:
        """Sleeps until one kernel of `op` that began at `start` is over."""
        sleep_until(start + self.seconds[op])
        if self.clock is not None:
            self.clock.append(Kernel(op, start, time.perf_counter()))

    def extra_repr(self) -> str:
        durations = ", ".join(f"{op.name}={seconds:g}" for op, seconds in self.seconds.items())
        return f"{len(self.weight)}, {durations}"


def _input_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return gradient * weight


class _SpendsI(torch.autograd.Function):
    """The identity; free forward, lasts I backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Emulated) -> Tensor:
        ctx.layer = layer
        return x.clone()  # no view: some runtimes detach a stage's output in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.layer.spend(Op.I, time.perf_counter())
        return gradients[0], None


class _SpendsW(torch.autograd.Function):
    """The identity on a weight; free forward, lasts W backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: Emulated) -> Tensor:
        ctx.layer = layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.layer.spend(Op.W, time.perf_counter())
        return gradients[0], None


def sleep_until(moment: float) -> None:
    """Sleeps with the least timer slack that the system grants this thread; never returns early."""
    if not getattr(_thread, "sharp", False):
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _thread.sharp = True
    if (seconds := moment - time.perf_counter()) > 0:
        time.sleep(seconds)
