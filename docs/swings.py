"""Draws docs/swift.svg: the bubble against the number of micro-batches where stage times swing, from the simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeswift.cost import Costs
from pipeswift.policy import Swift, calibrate
from pipeswift.schedules import build
from pipeswift.simulate import factors, replay, run, varied
from pipeswift.trace import Trace, bubble_rate

RANKS, SEEDS = 8, 20
MICROBATCHES = (8, 16, 32, 64, 128)
SIGMAS = (0.0, 0.2, 0.4, 0.8)
FILE = Path(__file__).parent / "swift.svg"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "pipeswift",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
Clock = Callable[[Costs], Trace]


def static(name: str) -> Callable[[int, Costs], Clock]:
    return lambda m, calibration: lambda costs: replay(build(name, RANKS, m), costs)


def swift(m: int, calibration: Costs) -> Clock:
    hint, slots = build("zb-h1", RANKS, m), {(stage, 0): RANKS for stage in range(RANKS)}
    policy = Swift(hint, slots, calibration=calibrate(replay(hint, calibration)))
    return lambda costs: run(hint, costs, policy, slots)


LINES = {"1F1B": static("1f1b"), "ZB-H1": static("zb-h1"), "swift": swift}


def bubble(make: Callable[[int, Costs], Clock], m: int, sigma: float) -> float:
    """Idle over busy seconds, as the median over the seeds; (p-1)/m for 1F1B without swing and latency."""

    def costs(seed: int) -> Costs:
        return varied(Costs.uniform(RANKS, W=0.8, comm=0.02), factors(seed, RANKS, m, sigma))

    clock = make(m, costs(SEEDS))
    idle = [bubble_rate(clock(costs(seed)), by="makespan") for seed in range(SEEDS if sigma else 1)]
    return float(np.median([share / (1.0 - share) for share in idle]))


def against_microbatches(axes: Axes, sigma: float) -> None:
    for name, make in LINES.items():
        axes.plot(MICROBATCHES, [bubble(make, m, sigma) for m in MICROBATCHES], label=name, marker=".")
    axes.plot(MICROBATCHES, [(RANKS - 1) / m for m in MICROBATCHES], "k:", label="(p-1)/m")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(MICROBATCHES, [str(m) for m in MICROBATCHES])
    axes.set_xlabel("micro-batches")
    axes.set_title(f"sigma {sigma:g}", loc="left")


def draw(file: Path = FILE) -> None:
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(9, 3.4), layout="constrained")
        panels = picture.subplots(1, len(SIGMAS), sharey=True)
        for axes, sigma in zip(panels, SIGMAS, strict=True):
            against_microbatches(axes, sigma)
        ticks = (0.05, 0.1, 0.2, 0.5, 1.0)
        panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panels[0].minorticks_off()
        panels[0].set_ylabel("bubble: idle over busy time")
        panels[0].legend(frameon=False, loc="lower left")
        picture.savefig(file, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw()
