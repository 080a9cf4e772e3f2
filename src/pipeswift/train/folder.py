"""The folder of one run: settings, the profile it was cut by, metrics, and a late step as a trace and as a picture."""

from __future__ import annotations

import csv
from dataclasses import astuple, fields
from itertools import chain, count
from pathlib import Path
from typing import IO

from pipeswift.errors import PipeSwiftError
from pipeswift.report import perfetto
from pipeswift.train.comparison import Comparison
from pipeswift.train.config import Config, dumps
from pipeswift.train.cut import Cut
from pipeswift.train.metrics import Row, Step

_DRAWN = 8  # replicas in the picture; of more, rows would be too low to read
COLUMNS = ("step", "held_out", *(field.name for field in fields(Step)))


class RunFolder:
    """Writes config.toml on opening, profile.json with the cut, metrics.csv row by row, and the rest at the end."""

    def __init__(self, config: Config):
        self._config, self.path = config, _fresh(config.run.folder)
        (self.path / "config.toml").write_text(dumps(config), encoding="utf-8")
        self._file: IO[str] = (self.path / "metrics.csv").open("w", newline="", encoding="utf-8")
        self._metrics = csv.writer(self._file)
        self._metrics.writerow(COLUMNS)

    def record(self, cut: Cut) -> None:
        """Writes the cut into config.toml, so that a run with that file has the same, and beside it the profile."""
        pipeline = self._config.pipeline.model_copy(update={"partition": cut.layout})
        (self.path / "config.toml").write_text(dumps(self._config.model_copy(update={"pipeline": pipeline})), "utf-8")
        if cut.profile is not None:
            cut.profile.save(self.path / "profile.json")

    def add(self, row: Row) -> None:
        step = astuple(row.training) if row.training else ()
        self._metrics.writerow(map(_cell, (row.step, row.held_out, *step)))
        self._file.flush()

    def finish(self, comparison: Comparison, notes: str) -> None:
        """Writes the timelines, as a Chrome trace and as a picture with `notes` below, with their live activations."""
        from pipeswift.report import gantt  # loads matplotlib

        self._file.close()
        predicted, replicas = comparison.predicted, comparison.replicas
        with (self.path / "trace.json").open("w", encoding="utf-8") as file:
            perfetto.write((predicted, *replicas), file, memory=comparison.memory)
        title = f"{comparison.schedule.name}: one training step"
        file = str(self.path / "timeline.svg")
        traces = predicted, *replicas[:_DRAWN]
        gantt.save(traces, file, format="svg", memory=comparison.memory, title=title, notes=notes)


def _fresh(wanted: Path) -> Path:
    """Makes `wanted`, or the first of wanted-2, wanted-3, ... that does not exist: no run writes over another."""
    for path in chain([wanted], (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.is_dir():
                break
        except OSError as error:
            raise PipeSwiftError(
                f"run.folder = {path} cannot be made: {error.strerror}. Give a folder in a place that is writable."
            ) from error
    raise PipeSwiftError(f"run.folder = {wanted} is a file. Give the name of a folder, for example runs/train.")


def _cell(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "; ".join(" ".join(map(str, numbers)) for numbers in value)
    if isinstance(value, tuple):
        return " ".join(f"{share:.3f}" for share in value)
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
