"""`pipeswift train`: trains a language model as a pipeline of local processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="Settings, a TOML file, such as examples/quickstart.toml.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE_OR_FOLDER", help="Text to train on, instead of the standard library."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Overrides a setting; repeatable.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="NAME", help="Who decides what a rank starts next: follow, swift or replan."),
    ] = None,
) -> None:
    """Train a model; with torchrun, each of its processes is a rank, otherwise this starts one per rank."""
    from pipeswift.train import config as settings
    from pipeswift.train import data as text

    overrides = list(set_ or [])
    for name, value in (("data.path", data), ("pipeline.policy", policy)):
        if value is not None:
            overrides.append(f"{name}={json.dumps(str(value), ensure_ascii=False)}")
    chosen = settings.load(config, overrides)
    text.files_of(chosen.data.path)  # a missing file is reported before any process starts

    from pipeswift.train import launch, worker  # these load torch

    if worker.started_by_torchrun():
        worker.run(chosen)
    else:
        launch.launch(chosen, debug=bool(context.obj))
