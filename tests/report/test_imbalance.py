"""The unevenness of experts' loads, read off counters of a step."""

from dataclasses import replace

import numpy as np
import pytest

from pipeswift.report.imbalance import Imbalance, imbalance
from pipeswift.trace import Counter
from tests.report.timelines import SHORT

LAYOUT = (2, 1)  # layers 0 and 1, layer 2


def replica(**rows):
    """A trace whose rank 0 tells of layer 1, rank 1 of layer 2: rows1=[[micro-batch 0's, ...], ...], by index."""
    counters = []
    for name, table in rows.items():
        columns = np.array(table).T
        kind, layer = name[:-1], name[-1]
        moments = np.arange(float(len(table)))
        counters += [Counter(f"{layer}.1: {kind} {i}", int(layer) - 1, moments, each) for i, each in enumerate(columns)]
    return replace(SHORT, counters=tuple(counters))


def test_loads_are_added_up_over_micro_batches_and_replicas():
    replicas = [
        replica(rows1=[[4, 0], [2, 2]], rows2=[[1, 1], [1, 1]]),
        replica(rows1=[[0, 4], [4, 0]], rows2=[[3, 1], [1, 3]]),
    ]
    assert imbalance(replicas, LAYOUT) == [Imbalance(0, 1.25, None, None), Imbalance(1, 1.0, None, None)]


def test_micro_batches_may_be_uneven_where_a_step_is_even():
    first = replica(rows1=[[4, 0], [0, 4]], taken1=[[4, 0], [0, 4]])
    second = replica(rows1=[[3, 1], [1, 3]], taken1=[[3, 1], [1, 3]])
    assert imbalance([first, second], LAYOUT) == [Imbalance(0, 1.0, 1.0, 7 / 4)]


def test_the_most_uneven_group_and_layer_count():
    even = replica(rows1=[[2, 2]], taken1=[[2, 2]])
    skewed = replica(rows1=[[4, 0]], taken1=[[3, 1]])  # with a capacity, some go nowhere or elsewhere
    assert imbalance([even, even, even, skewed], LAYOUT) == [Imbalance(0, 10 / 8, 5 / 4, 5 / 4)]


def test_layers_of_a_stage_make_one_load_of_a_rank():
    here = replica(rows1=[[4, 0]], taken1=[[4, 0]])
    there = replica(rows2=[[0, 4]], taken2=[[0, 4]])
    on_rank_0 = tuple(replace(counter, rank=0) for counter in there.counters)
    both = replace(here, counters=(*here.counters, *on_rank_0))
    assert imbalance([both, both], (3,)) == [Imbalance(0, 2.0, 1.0, 1.0)]


def test_no_token_is_no_imbalance():
    assert imbalance([replica(rows1=[[0, 0]])], LAYOUT) == [Imbalance(0, 1.0, None, None)]


@pytest.mark.parametrize("counters", [(), (Counter("rule follow", 0, np.zeros(1), np.ones(1)),)])
def test_without_experts_there_is_none(counters):
    assert imbalance([replace(SHORT, counters=counters)], LAYOUT) == []
