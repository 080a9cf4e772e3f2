"""Every zero-bubble schedule, every small shape, through the verifier; and the published rates."""

import csv
from pathlib import Path

import pytest

from pipeswift.cost import Costs
from pipeswift.schedules import build, entry
from pipeswift.simulate import replay
from pipeswift.trace import bubble_rate
from pipeswift.verify import verify

NAMES = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
TABLE5 = list(csv.DictReader((Path(__file__).parents[1] / "golden" / "zero_bubble_table5.csv").open()))


@pytest.mark.parametrize("receive_pool", [1, 2])
@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_is_valid_within_the_memory_it_claims(name, p, receive_pool):
    peak = entry(name).memory
    assert peak is not None
    for m in range(1, 18):
        limit = max(peak.of(p, m, entry(name).chunks, rank) for rank in range(p))
        assert verify(build(name, p, m), receive_pool=receive_pool, memory_limit=limit) == []


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("row", TABLE5, ids=lambda row: f"{row['model']}-m{row['m']}")
def test_published_rate(name, row):
    """Qi et al. 2024, Zero Bubble Pipeline Parallelism, table 5 (rates) from the costs of table 9."""
    p, m = int(row["p"]), int(row["m"])
    costs = Costs.uniform(p, F=float(row["F"]), I=float(row["I"]), W=float(row["W"]), comm=float(row["comm"]))
    assert round(bubble_rate(replay(build(name, p, m), costs), by="span"), 4) == float(row[name])


@pytest.mark.parametrize(
    ("p", "m", "rates"),
    [
        (4, 8, {"v-min": 0.1864, "v-half": 0.0943, "zb-v": 0}),
        (8, 24, {"v-min": 0.1579, "v-half": 0.1056, "zb-v": 0}),
        (16, 64, {"v-min": 0.1332, "v-half": 0.0965, "zb-v": 0}),
    ],
)
def test_rates_of_the_v_schedules_with_equal_passes(p, m, rates):
    costs = Costs.uniform(2 * p, chunks=2)
    for name, rate in rates.items():
        assert round(bubble_rate(replay(build(name, p, m), costs), by="span"), 4) == rate
