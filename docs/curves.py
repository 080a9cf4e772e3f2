"""Draws docs/schedules/bubble-latency.svg and bubble-memory.svg: all schedules in one picture, from the simulator."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.schedules import ScheduleError
from pipeswift.simulate import replay
from pipeswift.trace import bubble_rate, peak_memory

RANKS = 8
LATENCIES = [step / 20 for step in range(21)]  # in units of F
BUDGETS = range(1, 17)  # activations
MOST = 64  # micro-batches
FOLDER = Path(__file__).parent / "schedules"
NAMES = [entry.name for entry in schedules.entries() if entry.flush and entry.name != "naive"]
COLOURS = {name: f"C{index}" for index, name in enumerate(NAMES)}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "pipeswift",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@cache
def _measured(name: str, microbatches: int, latency: float = 0.0) -> tuple[float, float]:
    """(bubble rate by span, peak activations of the worst rank) with F = I = W = 1; ScheduleError if there is none."""
    schedule = schedules.build(name, RANKS, microbatches)
    costs = Costs.uniform(schedule.num_stages, chunks=schedule.chunks, comm=latency)
    trace = replay(schedule, costs)
    return bubble_rate(trace, by="span"), float(peak_memory(trace, costs.memory).max())


def _best_within(name: str, budget: float) -> float | None:
    """The bubble rate with as many micro-batches as the budget allows, up to MOST; None if not even one fits."""
    for microbatches in range(MOST, 0, -1):
        try:
            rate, peak = _measured(name, microbatches)
        except ScheduleError:
            continue
        if peak <= budget:
            return rate
    return None


def against_latency(axes: Axes, microbatches: int = 32) -> None:
    for name in NAMES:
        rates = [_measured(name, microbatches, latency)[0] for latency in LATENCIES]
        axes.plot(LATENCIES, rates, label=name, color=COLOURS[name])
    axes.set_xlabel("latency of a message / F")
    axes.set_title(f"p = {RANKS}, m = {microbatches}, F = I = W", loc="left")


def at_equal_memory(axes: Axes) -> None:
    for name in NAMES:
        found = [(budget, rate) for budget in BUDGETS if (rate := _best_within(name, budget)) is not None]
        axes.step(*zip(*found, strict=True), where="post", label=name, color=COLOURS[name])
    axes.set_xlabel("activations that a rank may hold")
    axes.set_title(f"p = {RANKS}, F = I = W, as many micro-batches as fit, {MOST} at most", loc="left")


def draw_all(folder: Path = FOLDER) -> None:
    for name, draw in (("bubble-latency", against_latency), ("bubble-memory", at_equal_memory)):
        with matplotlib.rc_context(STYLE):
            picture = Figure(figsize=(8, 4.5), layout="constrained")
            axes = picture.add_subplot()
            draw(axes)
            axes.set_ylabel("bubble rate by span")
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False, ncols=2)
            picture.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw_all()
