"""How layers see what enters a stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeswift.runtime.engine import inner


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last),  # a reshape forgets how one sample is laid out
        torch.ones(3).expand(2, 3),
        torch.tensor(1.0),
        torch.ones(0, 3),
    ],
    ids=["rows", "columns", "channels last", "expanded", "number", "empty"],
)
def test_a_layer_sees_a_leaf_s_memory_in_the_graph(leaf: Tensor):
    leaf = leaf.requires_grad_()
    seen = inner(leaf)
    assert not seen.is_leaf
    assert (seen.stride(), seen.data_ptr()) == (leaf.stride(), leaf.data_ptr())
    assert torch.equal(seen, leaf)
    seen.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(leaf.shape))


def test_a_layer_may_change_it_in_place():
    leaf = torch.ones(2, 3, requires_grad=True)
    inner(leaf).mul_(2).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), 2.0))


def test_what_needs_no_gradient_is_left_as_it_is():
    numbers = torch.arange(3)
    assert inner(numbers) is numbers
