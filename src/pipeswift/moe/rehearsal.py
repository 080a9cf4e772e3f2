"""What experts and their all-to-alls take, measured between steps with loads like those of the steps before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeswift.ir import Op
from pipeswift.runtime.engine import edge_of, run_backward
from pipeswift.runtime.ledger import Ledger
from pipeswift.runtime.pending import weight_gradients
from pipeswift.runtime.recorder import clock

SHARES = (1.0, 0.5, 0.125)  # of the load, to see what of the time does not shrink with it
REPEAT = 3
LEAST = 16  # rows to measure with, at least


class Load(NamedTuple):
    """Rows of one micro-batch on one rank: its own that stay, those of others, its own that leave; and its tokens."""

    own: float
    others: float
    sent: float
    tokens: float

    @classmethod
    def mean(cls, loads: Sequence[Load]) -> Load:
        return cls(*map(fmean, zip(*loads, strict=True)))

    @property
    def computed(self) -> float:
        return self.own + self.others


@contextmanager
def gradients_aside(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, parameters have no gradients; outside, those that they had."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def seconds_of(layer: Callable[[Tensor], Tensor], rows: Tensor, ledger: Ledger) -> dict[Op, float]:
    """Median seconds of F, I and W of a module that `ledger` splits."""
    runs = [_passes(layer, rows, ledger) for _ in range(REPEAT + 1)][1:]
    return {op: median(run[op] for run in runs) for op in (Op.F, Op.I, Op.W)}


def _passes(layer: Callable[[Tensor], Tensor], rows: Tensor, ledger: Ledger) -> dict[Op, float]:
    moments = [clock()]
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        made = layer(leaf)
        moments.append(clock())
        edge = edge_of(made)
        with ledger.leaving("rehearsal", (edge,)) as left:
            run_backward((edge,), (made.detach(),))
    moments.append(clock())
    weight_gradients(left)
    moments.append(clock())
    return {op: end - start for op, start, end in zip((Op.F, Op.I, Op.W), moments, moments[1:], strict=False)}
