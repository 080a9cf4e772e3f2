"""The trainer without flush: many updates in a step, on every rank as many, at a rate that heeds their staleness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeswift.train.config import Config, parse
from pipeswift.train.loop import train
from pipeswift.train.metrics import Row
from tests.procs import Pool


def settings(text: Path, **pipeline: Any) -> Config:
    return parse(
        {
            "model": {"blocks": 2, "width": 16, "heads": 2, "context": 32},
            "train": {"steps": 3, "batch": 16, "microbatches": 8, "warmup": 0, "lr": 0.01, "staleness_correction": 6},
            "pipeline": {"pp": 2, "schedule": "pipedream"} | pipeline,
            "data": {"path": str(text)},
        }
    )


def rows_of(rank: int, world: int, config: Config) -> list[Row]:
    rows: list[Row] = []
    train(config, on_cut=lambda cut: None, on_row=rows.append)
    return rows


@pytest.mark.parametrize(("weights", "every"), [("stash", 1), ("vertical", 1), ("2bw", 2), ("none", 1)])
def test_every_policy_learns(procs: Pool, tmp_path: Path, weights: str, every: int):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    config = settings(text, weights=weights, updates_every=every)
    first, second = procs.run(rows_of, config, world=2)
    assert first[-1].held_out == second[-1].held_out
    assert first[-1].held_out is not None
    assert first[0].held_out is not None
    assert first[-1].held_out < first[0].held_out
    for one, other in zip(first[1:], second[1:], strict=True):
        assert one.training
        assert other.training
        assert one.training.gradient_norm == other.training.gradient_norm > 0
    if weights == "stash":  # the first stage is an update late, the last never
        assert first[1].training
        assert second[1].training
        assert first[1].training.learning_rate < second[1].training.learning_rate
