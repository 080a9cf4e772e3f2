"""The grouped product is a product per group, with one kernel or without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeswift.moe import grouped as module
from pipeswift.moe.grouped import bank, grouped
from pipeswift.runtime.backward import attach
from pipeswift.runtime.engine import edge_of, run_backward
from pipeswift.runtime.ledger import Ledger
from pipeswift.runtime.pending import weight_gradients

SIZES = (3, 0, 5, 2)


def together(dtype: torch.dtype = torch.float32, width: int = 8) -> list[nn.Parameter]:
    torch.manual_seed(1)
    matrices = torch.randn(4, width, 16, dtype=dtype)
    return [nn.Parameter(matrix) for matrix in matrices]


def apart(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(weight.detach().clone()) for weight in weights]


def run(weights: list[nn.Parameter], x: torch.Tensor, sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = grouped(x, sizes, weights)
    y.backward(torch.ones_like(y).cumsum(0))
    return [y.detach(), *(tensor.grad for tensor in (x, *weights) if tensor.grad is not None)]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 8), (torch.float32, 6), (torch.float64, 8)], ids=str)
def test_it_is_a_product_per_group(dtype, width):
    weights, x = together(dtype, width), torch.randn(10, width, dtype=dtype)
    plain, leaf = apart(weights), x.clone().requires_grad_()
    y = torch.cat([rows @ weight for rows, weight in zip(leaf.split(SIZES), plain, strict=True)])
    y.backward(torch.ones_like(y).cumsum(0))
    expected = [y.detach(), *(tensor.grad for tensor in (leaf, *plain))]
    for ours in (run(weights, x), run(apart(weights), x)):
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))  # type: ignore[arg-type]


def test_one_kernel_is_used_where_the_matrices_lie_together(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "grouped_mm", lambda *args, **_: calls.append(1) or args[0].mm(args[1][0]))
    weights, x = together(), torch.randn(10, 8)
    grouped(x, SIZES, weights)
    assert calls == [1]
    grouped(x, SIZES, apart(weights))
    assert calls == [1]


def test_matrices_lie_together_when_each_starts_where_the_last_ends():
    weights = together()
    whole = bank(weights)
    assert whole is not None
    assert torch.equal(whole, torch.stack(list(weights)))
    part = bank(weights[1:3])
    assert part is not None
    assert torch.equal(part, torch.stack(list(weights[1:3])))
    assert bank(weights[::2]) is None
    assert bank(apart(weights)) is None


def test_without_a_row_there_are_zero_gradients():
    weights = together()
    y, *gradients = run(weights, torch.empty(0, 8), (0, 0, 0, 0))
    assert y.shape == (0, 16)
    assert [gradient.shape for gradient in gradients] == [(0, 8), *[(8, 16)] * 4]
    assert not any(gradient.any() for gradient in gradients)


class Layer(nn.Module):
    """A grouped product with its weights, each `times` as large."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self._times = times
        for index, weight in enumerate(together()):
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return grouped(x, SIZES, [w if self._times == 1.0 else self._times * w for w in self.parameters()])


def test_weights_wait_for_w_in_a_split_backward():
    layer, ledger, x = Layer(), Ledger(), torch.randn(10, 8)
    y, to_x, *to_weights = run(list(layer.parameters()), x)
    layer.zero_grad()
    attach(layer, ledger)
    leaf = x.clone().requires_grad_()
    edge = edge_of(layer(leaf))
    with ledger.leaving(None, (edge,)) as pendings:
        run_backward((edge,), (torch.ones_like(y).cumsum(0),))
    assert torch.equal(leaf.grad, to_x)  # pyright: ignore[reportArgumentType]
    assert all(weight.grad is None for weight in layer.parameters())
    weight_gradients(pendings)
    for weight, expected in zip(layer.parameters(), to_weights, strict=True):
        assert torch.equal(weight.grad, expected)  # pyright: ignore[reportArgumentType]


def test_what_a_weight_was_computed_from_gets_its_gradient_in_i():
    # It was left for W, which gave it to the computed weight.
    layer, ledger, x = Layer(2.0), Ledger(), torch.randn(10, 8)
    _, _, *to_weights = run([nn.Parameter(2 * weight.detach()) for weight in layer.parameters()], x)
    attach(layer, ledger)
    edge = edge_of(layer(x))
    with ledger.leaving(None, (edge,)) as pendings:
        run_backward((edge,), (torch.ones(10, 16).cumsum(0),))
    assert not pendings
    for weight, expected in zip(layer.parameters(), to_weights, strict=True):
        assert torch.equal(weight.grad, 2 * expected)  # pyright: ignore[reportArgumentType]
