"""Prints where in the step each schedule idles: before a rank's first backward, after its last forward, in between."""

import sys
from itertools import pairwise

import numpy as np

from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.schedules import build
from pipeswift.simulate import replay
from pipeswift.trace import Trace


def idle_by_phase(trace: Trace) -> np.ndarray:
    """Mean over ranks of the seconds idle in the three phases, within the makespan; shape (3,)."""
    last = trace.end.max()
    phases = []
    for spans in trace.by_rank():
        warm = spans.start[spans.op != Op.F].min()
        cool = spans.end[spans.op == Op.F].max()
        bounds = [0.0, warm, max(warm, cool), last]
        for low, high in pairwise(bounds):
            inside = np.clip(spans.end, low, high) - np.clip(spans.start, low, high)
            phases.append(high - low - inside.sum())
    return np.array(phases).reshape(-1, 3).mean(axis=0)


if __name__ == "__main__":
    ranks, microbatches = int(sys.argv[1]), int(sys.argv[2])
    for name in sys.argv[3:]:
        schedule = build(name, ranks, microbatches)
        costs = Costs.uniform(schedule.num_stages, chunks=schedule.chunks)
        start, middle, end = idle_by_phase(replay(schedule, costs))
        print(f"{name}: {start:g} before the first backward, {middle:g} between, {end:g} after the last forward")
