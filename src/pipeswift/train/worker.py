"""What every process of a run does: trains, and on rank 0 shows and writes down how it goes."""

from __future__ import annotations

import os

import torch.distributed as dist

from pipeswift.train.closing import close, tables, text_of
from pipeswift.train.comparison import compare
from pipeswift.train.config import Config
from pipeswift.train.display import display
from pipeswift.train.folder import RunFolder
from pipeswift.train.loop import train
from pipeswift.train.metrics import Row


def started_by_torchrun() -> bool:
    """Whether this process is one of a group that torchrun, or a launcher like it, started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(config: Config) -> None:
    """One rank's whole run. Expects the environment that torchrun gives to its processes."""
    if int(os.environ.get("RANK", "0")) == 0:
        _lead(config)
    else:
        train(config, on_cut=lambda cut: None, on_row=lambda row: None)
    dist.destroy_process_group()


def _lead(config: Config) -> None:
    folder = RunFolder(config)
    with display(config.train.steps) as view:

        def report(row: Row) -> None:
            folder.add(row)
            view.show(row)

        outcome = train(config, on_cut=folder.record, on_row=report)
    every = None if outcome.schedule.flush else config.pipeline.updates_every or 1
    comparison = compare(outcome.schedule, outcome.late_steps, every)
    folder.finish(comparison, text_of(tables(comparison.replicas, outcome.cut.layout)))
    close(outcome, comparison, folder.path)
