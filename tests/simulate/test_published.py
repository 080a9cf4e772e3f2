"""Published numbers and closed forms, from the replay of the generated orders."""

import csv
from pathlib import Path

import pytest

from pipeswift.cost import Costs
from pipeswift.schedules import build
from pipeswift.simulate import replay
from pipeswift.trace import bubble_rate, busy_per_rank, makespan, peak_memory

TABLE5 = [
    {key: value if key == "model" else float(value) for key, value in row.items()}
    for row in csv.DictReader((Path(__file__).parents[1] / "golden" / "zero_bubble_table5.csv").open())
]


def by_span(name, row, chunks=1):
    p, m = int(row["p"]), int(row["m"])
    costs = Costs.uniform(p * chunks, F=row["F"], I=row["I"], W=row["W"], comm=row["comm"], chunks=chunks)
    return bubble_rate(replay(build(name, p, m, chunks=chunks), costs), by="span")


@pytest.mark.parametrize("row", TABLE5, ids=lambda row: f"{row['model']}-m{row['m']:.0f}")
class TestZeroBubbleTable5:
    """Qi et al. 2024, Zero Bubble Pipeline Parallelism, tables 5 and 9."""

    def test_1f1b(self, row):
        assert round(by_span("1f1b", row), 4) == row["1f1b"]

    def test_interleaved(self, row):
        rate = by_span("interleaved-1f1b", row, chunks=int(row["v"]))
        assert rate == pytest.approx(row["interleaved-1f1b"], abs=0.004)


@pytest.mark.parametrize(("p", "m", "rate"), [(4, 8, 0.2727), (8, 24, 0.2258), (16, 64, 0.1899)])
def test_1f1b_with_equal_passes(p, m, rate):
    assert round(bubble_rate(replay(build("1f1b", p, m), Costs.uniform(p)), by="span"), 4) == rate


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("m", "expected"), [(1, 12), (2, 15)])
def test_fewer_microbatches_than_ranks(name, m, expected):
    assert makespan(replay(build(name, 4, m), Costs.uniform(4, F=1, I=1, W=1))) == expected


@pytest.mark.parametrize(("name", "expected"), [("naive", 128), ("gpipe", 44), ("1f1b", 44)])
def test_1f1b_is_no_faster_than_gpipe_and_serial_execution_is_neither(name, expected):
    assert makespan(replay(build(name, 4, 8), Costs.uniform(4, F=2, I=1, W=1))) == expected


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 8), (5, 3), (8, 8)])
class TestClosedForms:
    def test_idle_time(self, p, m):
        for name in ("gpipe", "1f1b"):
            trace = replay(build(name, p, m), Costs.uniform(p, F=2, I=3, W=4))
            assert (makespan(trace) - busy_per_rank(trace) == (p - 1) * (2 + 7)).all()

    def test_idle_time_of_interleaving(self, p, m):
        v, m = 2, m * p
        trace = replay(build("interleaved-1f1b", p, m, chunks=v), Costs.uniform(p * v, F=2, I=3, W=5, chunks=v))
        assert (makespan(trace) - busy_per_rank(trace) == (p - 1) * (2 + 8) / v).all()

    def test_peak_activations(self, p, m):
        def peaks(name):
            costs = Costs.uniform(p)
            return peak_memory(replay(build(name, p, m), costs), costs.memory).tolist()

        assert peaks("naive") == [1] * p
        assert peaks("gpipe") == [m] * p
        assert peaks("1f1b") == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 3, 16), (8, 2, 16)])
def test_interleaving_needs_pv_plus_p_minus_1_chunks_on_the_first_rank(p, v, m):
    costs = Costs.uniform(p * v, chunks=v)
    peaks = peak_memory(replay(build("interleaved-1f1b", p, m, chunks=v), costs), costs.memory)
    assert peaks[0] == pytest.approx((p * v + p - 1) / v)
