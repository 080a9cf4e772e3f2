import io
import json
import time
from itertools import pairwise

import numpy as np

from pipeswift import schedules
from pipeswift.cost import Costs, activations
from pipeswift.report import perfetto
from pipeswift.simulate import replay
from pipeswift.trace import POINT_TO_POINT, Counter
from tests.report.timelines import SHORT, WOVEN, timeline


def written(*traces, memory=None):
    file = io.StringIO()
    perfetto.write(traces, file, memory)
    return json.loads(file.getvalue())["traceEvents"]


def only(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_a_span_is_a_complete_event_in_microseconds_from_the_first_start():
    assert only(written(SHORT), "X")[1] == {
        "name": "B0",
        "cat": "B",
        "ph": "X",
        "ts": 2e6,
        "dur": 1e6,
        "pid": 0,
        "tid": 0,
        "args": {"stage": 0, "microbatch": 0},
    }


def test_each_rank_is_a_process_and_each_lane_a_thread():
    events = written(SHORT, timeline((0, "0F0", 0, 1), name="wire", lane=POINT_TO_POINT))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "short rank 0", 1: "short rank 1", 2: "wire rank 0"}
    threads = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == [(0, 0, "compute"), (1, 0, "compute"), (2, 2, "point-to-point")]


def test_a_woven_pass_has_a_thread_beside_the_first():
    events = written(WOVEN)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {(0, 0): "compute", (0, 3): "compute, beside it", (1, 0): "compute"}
    assert [(e["name"], e["pid"], e["tid"], e["dur"]) for e in only(events, "X")] == [
        ("F1", 0, 0, 3e6),
        ("B0", 0, 3, 3e6),
        ("F1", 1, 0, 1e6),
        ("B0", 1, 0, 2e6),
    ]


def test_counters_are_counter_events():
    depth = Counter('queue "in"', 1, np.array([10.0, 11.5]), np.array([0, 2]))
    trace = timeline((0, "0F0", 10, 11), (1, "1F0", 11, 12), counters=[depth])
    assert [(e["name"], e["pid"], e["ts"], e["args"]) for e in only(written(trace), "C")] == [
        ('queue "in"', 1, 0.0, {"value": 0}),
        ('queue "in"', 1, 1.5e6, {"value": 2}),
    ]


def test_live_activations_are_a_counter():
    events = [event for event in only(written(SHORT, memory=activations(2)), "C") if event["pid"] == 0]
    assert [(event["ts"], event["args"]["value"]) for event in events] == [(0.0, 1.0), (3e6, 0.0)]


def test_a_span_never_reaches_into_the_next():
    """Rounding start and length apart makes viewers nest the second span into the first, or drop it."""
    ends = np.cumsum(np.full(300, 1e-6 / 7)) + 1e6
    trace = timeline(*((0, f"0F{i}", start, end) for i, (start, end) in enumerate(pairwise(ends))))
    events = only(written(trace), "X")
    assert all(round((a["ts"] + a["dur"]) * 1e3) <= round(b["ts"] * 1e3) for a, b in pairwise(events))


def test_65_thousand_spans_take_about_a_second_at_most():
    schedule = schedules.build("1f1b", 64, 512)
    trace = replay(schedule, Costs.uniform(64))
    began = time.process_time()
    perfetto.write([trace], io.StringIO(), activations(64))
    assert time.process_time() - began < 1.5
