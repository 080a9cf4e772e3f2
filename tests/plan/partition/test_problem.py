"""Problems that cannot be are refused, by the name of what is wrong."""

import numpy as np
import pytest

from pipeswift.plan.partition import Layers, Machine, PartitionError, Problem
from tests.plan.profiles import layer, profile

LAYERS, MACHINE = Layers.of([1.0] * 4), Machine.of(2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Layers.of([]), "seconds must be one number, or 1, one per layer: got 0"),
        (lambda: Layers.of([1, float("nan")]), "seconds must be finite numbers of at least 0"),
        (
            lambda: Layers.of([1, 2], saved_bytes=[1, 2, 3]),
            "saved_bytes must be one number, or 2, one per layer: got 3",
        ),
        (lambda: Machine.of(0), "ranks must be at least 1"),
        (lambda: Machine.of(2, speeds=[1, 0]), "speeds must be above 0: got 0. Use 1"),
        (lambda: Machine.of(2, memory=0), "memory must be above 0"),
        (lambda: Machine.of(2, ranks_per_host=0), "ranks_per_host must be at least 1"),
        (lambda: Machine.of(2, inside=1.0, between=2.0), "between hosts at most as high as inside"),
        (lambda: Problem(LAYERS, MACHINE, transfers="both"), "transfers must be beside or within: got 'both'"),
        (lambda: Problem(LAYERS, MACHINE, objective="sum"), "objective must be rank or stage: got 'sum'"),
        (lambda: Problem(LAYERS, MACHINE, rank_of=(0, 0)), "rank_of must name each of the 2 ranks"),
        (lambda: Problem(LAYERS, MACHINE, rank_of=(0, 1, 0), replicate=True), "replicate needs one stage per rank"),
        (lambda: Problem(LAYERS, MACHINE, in_flight=np.ones(3)), "in_flight must be counts of at least 0, shape (2,)"),
        (lambda: Problem(LAYERS, MACHINE, versions=-np.ones(2)), "versions must be counts of at least 0"),
        (lambda: Problem(LAYERS, MACHINE, together=frozenset({3})), "together names layers that another one follows"),
        (lambda: Problem(LAYERS, MACHINE, apart=frozenset({-1})), "apart names layers that another one follows"),
        (lambda: Problem(LAYERS, MACHINE, apart=frozenset({0, 1})), "apart asks for 3 stages, and there are 2"),
        (
            lambda: Problem(LAYERS, MACHINE, together=frozenset({0}), apart=frozenset({0})),
            "layer 0 is both in together",
        ),
        (
            lambda: Problem(LAYERS, MACHINE, together=frozenset({0, 1, 2})),
            "4 layers with 3 cuts forbidden make at most 1",
        ),
        (lambda: Problem(LAYERS, MACHINE, rank_of=(0, 1, 0, 1, 0)), "(2 ranks with 3 chunks)"),
    ],
)
def test_what_cannot_be(make, text):
    with pytest.raises(PartitionError) as caught:
        make()
    assert text in str(caught.value)


def test_layers_of_a_profile():
    measured = profile([layer("embedding", bytes_=4), layer("head", F=2)])
    layers = Layers.profiled(measured)
    F, I, W, B = measured.seconds()  # noqa: E741
    assert np.array_equal(layers.seconds, F + B)
    assert np.array_equal(Layers.profiled(measured, split=True).seconds, F + (I + W))
    assert np.array_equal(layers.state_bytes, measured.parameter_bytes + measured.optimizer_bytes)
