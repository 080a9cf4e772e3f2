"""Cutting the list of layers: none lost, no stage empty, the same weights wherever a layer lands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime import Pipeline
from pipeswift.runtime.layers import check_layout, even_layout, materialise

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (30, 4, [8, 8, 7, 7]),
        (5, 4, [2, 1, 1, 1]),
        (38, 8, [5, 5, 5, 5, 5, 5, 4, 4]),
        (42, 16, [3] * 10 + [2] * 6),
        (27, 2, [14, 13]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_sizes_differ_by_one_at_most(layers: int, stages: int, sizes: list[int]):
    assert even_layout(layers, stages) == tuple(sizes)


def test_fewer_layers_than_stages_is_refused():
    with pytest.raises(PipeSwiftError, match=r"3 layers and the schedule 4 stages.*at most 3 stages"):
        even_layout(3, 4)


@pytest.mark.parametrize("layout", [[1, 1], [2, 2, 2, 2], [3, 0, 1, 1], [6, -1, 0, 0]])
def test_a_cut_of_ones_own_must_be_one(layout: list[int]):
    with pytest.raises(PipeSwiftError, match="layout"):
        check_layout(layout, 5, 4)


def test_a_cut_of_ones_own_is_used():
    pipe = Pipeline([nn.Identity] * 5, loss=lambda y, _: y.mean(), microbatches=1, layout=[5])
    assert pipe.layout == (5,)
    pipe.close()


def test_a_layer_gets_the_same_weights_wherever_it_is_built():
    torch.manual_seed(123)
    here = materialise(lambda: nn.Linear(2, 2), 3, seed=7, device=CPU)
    with torch.device("meta"):
        bare = nn.Linear(2, 2)
    there = materialise(bare, 3, seed=7, device=CPU)
    other = materialise(lambda: nn.Linear(2, 2), 4, seed=7, device=CPU)
    assert torch.equal(here.weight, there.weight)
    assert not torch.equal(here.weight, other.weight)


def test_a_meta_module_that_cannot_start_itself_is_named():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3))

    with torch.device("meta"):
        table = Table()
    with pytest.raises(PipeSwiftError, match=r"Table has weights but no reset_parameters"):
        materialise(table, 0, seed=0, device=CPU)


def test_batch_statistics_get_a_word_of_warning():
    with pytest.warns(UserWarning, match=r"BatchNorm1d.*each micro-batch"):
        Pipeline([lambda: nn.BatchNorm1d(4)], loss=lambda y, _: y.mean(), microbatches=2)
