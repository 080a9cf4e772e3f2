from pipeswift.cost import activations
from pipeswift.ir import F
from pipeswift.report import first_excess
from tests.report.timelines import timeline

TRACE = timeline(
    (0, "0F0", 0, 1), (0, "0F1", 1, 2), (0, "0F2", 2, 3), (1, "1F0", 1, 2), (1, "1F1", 2.5, 3), (0, "0B0", 4, 5)
)


def test_the_first_moment_over_the_limit():
    assert first_excess(TRACE, activations(2), 1) == (0, 1.0, F(0, 1), 2.0)
    assert first_excess(TRACE, activations(2), 2) == (0, 2.0, F(0, 2), 3.0)


def test_the_earliest_rank_is_named():
    late = timeline((0, "0F0", 0, 1), (0, "0F1", 5, 6), (1, "1F0", 1, 2), (1, "1F1", 2, 3))
    assert first_excess(late, activations(2), 1) == (1, 2.0, F(1, 1), 2.0)


def test_within_the_limit():
    assert first_excess(TRACE, activations(2), 3) is None


def test_three_thirds_fit_into_one():
    thirds = timeline(*((0, f"{stage}F0", stage, stage + 1) for stage in range(3)))
    assert first_excess(thirds, activations(3, chunks=3), 1) is None
