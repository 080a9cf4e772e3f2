"""The dynamic programme's own promises: pins, and the order among equally fast cuts."""

import numpy as np

from pipeswift.plan.partition import Layers, Machine, Problem
from pipeswift.plan.partition.dynamic import fastest, leanest
from pipeswift.plan.partition.pricing import Pricing


def sizes(stages) -> list[int]:
    return [stage.end - stage.first for stage in stages]


def test_among_equally_fast_cuts_the_rest_is_even():
    """The last layer alone sets the pace; before it, 4 and 4 are as even as can be, and 7 and 1 would be as fast."""
    problem = Problem(Layers.of([*[1.0] * 8, 9.0]), Machine.of(3))
    assert sizes(fastest(Pricing(problem))) == [4, 4, 1]


def test_among_equal_cuts_replicas_are_few():
    problem = Problem(Layers.of([1.0] * 4), Machine.of(4), replicate=True)
    assert [stage.replicas for stage in fastest(Pricing(problem))] == [1, 1, 1, 1]


def test_layers_that_take_no_time():
    assert sizes(fastest(Pricing(Problem(Layers.of([0.0] * 3), Machine.of(2))))) == [2, 1]


def test_the_leanest_cut_shares_memory_by_size():
    problem = Problem(Layers.of([1.0] * 6, state_bytes=1.0), Machine.of(2, memory=[2.0, 4.0]))
    assert sizes(leanest(Pricing(problem))) == [2, 4]


def test_pins_that_contradict_leave_no_cut():
    problem = Problem(Layers.of([1.0] * 6), Machine.of(3), together=frozenset({0, 2, 4}), apart=frozenset({1}))
    assert sizes(fastest(Pricing(problem))) == [2, 2, 2]
    over = Problem(Layers.of([1.0] * 5), Machine.of(3), together=frozenset({0, 3}), apart=frozenset({1, 2}))
    assert sizes(fastest(Pricing(over))) == [2, 1, 2]
    assert np.isinf(Pricing(over).limit).all()
