"""What stages hold, against the closed forms."""

import pytest

from pipeswift import schedules
from pipeswift.plan.partition import in_flight, noam


@pytest.mark.parametrize(
    ("name", "counts"),
    [("naive", [1, 1, 1]), ("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1]), ("zb-h2", [5, 5, 5])],
)
def test_in_flight(name, counts):
    assert in_flight(schedules.build(name, 3, 6)).tolist() == counts


def test_noam_is_ranks_over_replicas_rounded_up():
    assert noam(4).tolist() == [[4, 2, 2, 1], [3, 2, 1, 1], [2, 1, 1, 1], [1, 1, 1, 1]]
    assert noam(16)[0, 9 - 1] == 2  # the configuration 9-5-1-1
