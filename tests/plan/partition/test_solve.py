"""Solving: the same as trying everything, even where it is free to be, and quick."""

from math import inf
from time import process_time

import numpy as np
import pytest

from pipeswift import schedules
from pipeswift.ir import loop, vee
from pipeswift.plan.partition import Infeasible, Layers, Machine, PartitionError, Problem, evaluate, layout, partition
from tests.plan.partition.brute_force import least
from tests.plan.partition.problems import draw


def unit(layers: int, ranks: int, **rest) -> Problem:
    return Problem(Layers.of([1.0] * layers), Machine.of(ranks), **rest)


def places(place, ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(place(stage, ranks) for stage in range(ranks * chunks))


@pytest.mark.parametrize(("kind", "draws"), [("one stage per rank", 300), ("replicas", 300), ("chunks", 60)])
def test_equals_brute_force(kind, draws):
    random = np.random.default_rng(0)
    impossible = 0
    for _ in range(draws):
        problem = draw(random, kind)
        best = least(problem)
        try:
            found = partition(problem)
        except Infeasible:
            assert best == inf, problem
            impossible += 1
            continue
        assert found.bottleneck == pytest.approx(best, rel=1e-12), problem
        assert found.gap == 0
        again = evaluate(problem, found.layout, [stage.replicas for stage in found.stages])
        assert (again.stages, again.bottleneck) == (found.stages, found.bottleneck)
    assert 0 < impossible < draws / 2


@pytest.mark.parametrize(
    ("layers", "ranks", "sizes"),
    [
        (30, 4, [8, 8, 7, 7]),
        (38, 8, [5] * 6 + [4] * 2),
        (5, 4, [2, 1, 1, 1]),
        (42, 16, [3] * 10 + [2] * 6),
        (27, 2, [14, 13]),
        (4, 4, [1] * 4),
    ],
)
def test_equal_layers_are_shared_out_evenly(layers, ranks, sizes):
    """Elsewhere, 42 layers over 16 stages left some of them empty, and 30 over 4 lost two layers."""
    found = partition(unit(layers, ranks))
    assert list(found.layout) == sizes
    assert found.bottleneck == max(sizes)


@pytest.mark.parametrize("place", [loop, vee])
@pytest.mark.parametrize(("layers", "ranks", "chunks"), [(30, 4, 2), (26, 4, 3), (9, 2, 4)])
def test_equal_layers_are_shared_out_evenly_among_chunks(place, layers, ranks, chunks):
    found = partition(unit(layers, ranks, rank_of=places(place, ranks, chunks)))
    assert sum(found.layout) == layers
    assert max(found.layout) - min(found.layout) <= 1
    assert found.bottleneck == -(-layers // ranks)


def test_heavy_ends_get_fewer_layers():
    found = partition(Problem(Layers.of([2.0, *[1.0] * 8, 3.0]), Machine.of(4)))
    assert found.layout == (3, 3, 3, 1)


def test_twice_as_fast_takes_twice_as_much():
    found = partition(Problem(Layers.of([1.0] * 12), Machine.of(2, speeds=[1, 2])))
    assert (found.layout, found.bottleneck) == ((4, 8), 4.0)


def test_embedding_and_head_stay_with_a_block():
    layers = Layers.of([9.0, *[8.0] * 4, 9.0])
    assert partition(Problem(layers, Machine.of(4))).layout == (1, 2, 2, 1)
    assert partition(Problem(layers, Machine.of(4), together=frozenset({0, 4}))).layout == (2, 1, 1, 2)
    assert partition(Problem(layers, Machine.of(3), apart=frozenset({0, 4}))).layout == (1, 4, 1)


def test_a_slow_link_is_not_cut_where_much_goes_over():
    layers = Layers.of([1.0] * 4, output_bytes=[1.0, 5.0, 1.0, 0.0])
    assert partition(Problem(layers, Machine.of(2, inside=1.0))).layout == (3, 1)


def test_replicas_are_left_out_where_weights_are_dear():
    """Narayanan et al. 2019, sec. 5: convolutions get replicas, the large fully connected layers do not."""
    layers = Layers.of([6.0, 6.0, 1.0, 1.0], parameter_bytes=[1.0, 1.0, 50.0, 50.0], output_bytes=0.5)
    found = partition(Problem(layers, Machine.of(8, inside=2.0), replicate=True))
    assert [stage.replicas for stage in found.stages] == [7, 1]
    assert found.layout == (2, 2)


@pytest.mark.parametrize("replicate", [False, True])
def test_two_hundred_layers_over_sixty_four_ranks_take_less_than_a_second(replicate):
    random = np.random.default_rng(0)
    layers = Layers.of(random.uniform(1, 2, 200), output_bytes=1.0, parameter_bytes=random.uniform(5, 50, 200))
    problem = Problem(layers, Machine.of(64, inside=20.0), replicate=replicate)
    began = process_time()
    found = partition(problem)
    assert process_time() - began < 1
    assert sum(found.layout) == 200


def test_the_largest_replicated_problem_does_not_depend_on_where_the_search_looks_first():
    """The windows of cuts must not lose the best one: hosts with slow links force a bottleneck far above the ideal."""
    layers = Layers.of([1.0] * 12, parameter_bytes=100.0, output_bytes=40.0)
    problem = Problem(layers, Machine.of(4, ranks_per_host=2, inside=2.0, between=1.0), replicate=True)
    assert partition(problem).bottleneck == least(problem)


def test_the_gap_says_how_good_an_unfinished_search_is():
    layers = Layers.of(np.random.default_rng(0).uniform(1, 2, 98))
    found = partition(Problem(layers, Machine.of(8), rank_of=places(loop, 8, 2)), work=0.01)
    ideal = layers.seconds.sum() / 8
    assert 0 < found.gap <= 1 - ideal / found.bottleneck + 1e-12
    assert found.bottleneck < 1.05 * ideal


def test_too_little_memory_names_the_rank_and_what_would_do():
    layers = Layers.of([1.0] * 4, saved_bytes=10.0)
    problem = Problem(layers, Machine.of(2, memory=[30, 30]), in_flight=np.array([2, 1]))
    with pytest.raises(Infeasible, match=r"rank 1 needs 30|rank 0 needs 40") as caught:
        partition(Problem(layers, Machine.of(2, memory=25.0), in_flight=np.array([2, 1])))
    assert "Use 30 or more" in str(caught.value)
    assert partition(problem).layout == (1, 3)


def test_chunks_of_a_rank_share_its_memory():
    layers = Layers.of([1.0] * 4, state_bytes=[3.0, 1.0, 1.0, 1.0])
    with pytest.raises(Infeasible, match="rank 0 needs 4"):
        partition(Problem(layers, Machine.of(2, memory=3.5), rank_of=(0, 1, 0, 1)))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("interleaved-1f1b", 2), ("zb-v", None)])
def test_layout_for_a_schedule(name, chunks):
    """What `Pipeline(layout=...)` takes: the schedule's places, and memory for what it has in flight."""
    schedule = schedules.build(name, 2, 4, chunks)
    layers = Layers.of([1.0] * 9, saved_bytes=1.0)
    sizes = layout(layers, schedule)
    assert (len(sizes), sum(sizes)) == (schedule.num_stages, 9)
    with pytest.raises(Infeasible):
        layout(layers, schedule, Machine.of(2, memory=5.0))


def test_layout_for_a_pipeline_with_two_directions():
    """Ranks 0 and 3 both hold stages 0 and 3, so the heavy head and the light first layers go together."""
    schedule = schedules.build("dualpipe", 4, 8)
    assert schedule.num_stages == 4
    assert layout(Layers.of([1.0] * 8 + [4.0]), schedule) == (2, 3, 3, 1)


def test_more_stages_than_layers():
    with pytest.raises(PartitionError, match=r"3 layers make at most 3 stages.*Use at most 3 stages"):
        unit(3, 4)
    assert partition(unit(3, 4, replicate=True)).bottleneck == 0.75
