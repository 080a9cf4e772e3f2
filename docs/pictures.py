"""Draws the picture of every schedule on the list: docs/schedules/NAME.svg, the same bytes each time."""

from dataclasses import replace
from pathlib import Path

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.report import gantt
from pipeswift.simulate import replay

RANKS, MICROBATCHES = 4, 8
FOLDER = Path(__file__).parent / "schedules"


def draw_all(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for entry in schedules.entries():
        schedule = schedules.build(entry.name, RANKS, MICROBATCHES)
        costs = Costs.uniform(schedule.num_stages, chunks=schedule.chunks)
        costs = replace(costs, overlap=3 / schedule.chunks)  # F + B, drawn as one
        trace = replay(schedule, costs)
        gantt.save([trace], folder / f"{entry.name}.svg", format="svg", memory=costs.memory)


if __name__ == "__main__":
    draw_all()
