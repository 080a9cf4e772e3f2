"""Emulated kernels: exact gradients, each op in its place, and at least the time that was asked."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op
from pipeswift.rehearse.kernels import Emulated

WIDTH = 5


def stack(count, clock=None, *, F=0.0, I=0.0, W=0.0):  # noqa: E741
    return nn.Sequential(*(Emulated(WIDTH, F=F, I=I, W=W, clock=clock) for _ in range(count)))


def drawn(clock):
    return "".join(kernel.op.name for kernel in clock)


def test_it_is_a_product_with_the_exact_gradients():
    layer, x = Emulated(WIDTH, F=0, I=0, W=0), torch.randn(3, 4, WIDTH, requires_grad=True)
    y = layer(x)
    upstream = torch.randn_like(y)
    of_x, of_weight = torch.autograd.grad(y, (x, layer.weight), upstream)
    assert torch.equal(y, x * layer.weight)
    assert torch.equal(of_x, upstream * layer.weight)
    assert torch.equal(of_weight, (upstream * x).sum((0, 1)))


def test_a_stack_trains_like_the_plain_product():
    layers, x = stack(3), torch.randn(4, WIDTH)
    a, b, c = weights = list(layers.parameters())
    emulated = torch.autograd.grad(layers(x).square().mean(), weights)
    plain = torch.autograd.grad((x * a * b * c).square().mean(), weights)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(emulated, plain, strict=True))


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [
        (1, "F IW"),
        (2, "FF IWIW"),
        (3, "FFF IWIWIW"),
    ],
)
def test_forwards_then_a_backward_that_takes_i_and_w_of_each_layer(layers, pattern):
    clock = []
    loss = stack(layers, clock)(torch.randn(2, WIDTH)).sum()
    forward = drawn(clock)
    loss.backward()
    assert f"{forward} {drawn(clock[layers:])}" == pattern


def test_i_and_w_run_apart():
    clock = []
    layers, x = stack(2, clock), torch.randn(2, WIDTH, requires_grad=True)
    loss, first_weight = layers(x).sum(), next(layers.parameters())
    torch.autograd.grad(loss, (x,), retain_graph=True)
    torch.autograd.grad(loss, (first_weight,))
    assert drawn(clock) == "FF" + "II" + "IIW"


def test_no_backward_without_gradients():
    clock = []
    with torch.no_grad():
        stack(2, clock)(torch.randn(2, WIDTH))
    assert drawn(clock) == "FF"


def test_each_op_lasts_at_least_its_time():
    clock, seconds = [], {"F": 0.003, "I": 0.002, "W": 0.001}
    stack(2, clock, **seconds)(torch.randn(2, WIDTH)).sum().backward()
    assert all(kernel.end - kernel.start >= seconds[kernel.op.name] for kernel in clock)
    assert all(earlier.end <= later.start for earlier, later in pairwise(clock))


def test_the_clock_names_ops_as_everywhere():
    clock = []
    stack(1, clock)(torch.randn(2, WIDTH)).sum().backward()
    assert [kernel.op for kernel in clock] == [Op.F, Op.I, Op.W]


@pytest.mark.parametrize(("setting", "value"), [("F", -1.0), ("I", -0.1), ("W", -2.0), ("width", 0)])
def test_refuses_what_cannot_be(setting, value):
    with pytest.raises(PipeSwiftError, match=f"{setting}={value}"):
        Emulated(**{"width": WIDTH, setting: value})


def test_shows_its_durations():
    assert repr(Emulated(4, F=0.01, I=0.02, W=0)) == "Emulated(4, F=0.01, I=0.02, W=0)"
