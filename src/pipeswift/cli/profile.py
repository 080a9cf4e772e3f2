"""`pipeswift profile`: what each layer of a model costs, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeswift.cli import options, output
from pipeswift.errors import PipeSwiftError
from pipeswift.plan.profile import Layer, Profile, Timing

if TYPE_CHECKING:
    from rich.table import Table


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise typer.BadParameter(f"{text} is not a list of whole numbers from 1. Use 1,2,4, say.")
    return tuple(sizes)


def _rate(flag: str, what: str):
    return typer.Option(flag, parser=options.number(float, 1, 1e30), metavar="RATE", help=what)


def profile(
    config: Annotated[Path, typer.Argument(help="Settings, a TOML file, such as examples/quickstart.toml.")],
    sizes: Annotated[
        Any, typer.Option("--sizes", parser=_sizes, metavar="N,N,...", help="Samples per micro-batch.")
    ] = "1,2,4",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Overrides a setting; repeatable.")
    ] = None,
    flops: Annotated[
        float | None, _rate("--flops", "Estimate, for a machine of so many floating point operations per second.")
    ] = None,
    bandwidth: Annotated[
        float | None, _rate("--bandwidth", "And of so many bytes of memory per second; goes with --flops.")
    ] = None,
    json_: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the profile; `pipeswift partition` reads it.")
    ] = None,
) -> None:
    """Measure the layers of a model on this machine, or estimate them for another."""
    if (flops is None) != (bandwidth is None):
        raise PipeSwiftError("--flops and --bandwidth go together: give both to estimate, or none to measure")
    from pipeswift.train import config as settings

    chosen = settings.load(config, set_ or [])

    from pipeswift.train import sample  # loads torch

    if flops is None or bandwidth is None:
        found = sample.measured(chosen, sizes)
    else:
        found = sample.estimated(chosen, sizes, flops=flops, bandwidth=bandwidth)
    if json_:
        with output.opened(json_, "--json") as file:
            file.write(found.to_json())
    if json_ != "-":
        threads = "1 thread" if found.threads == 1 else f"{found.threads} threads"
        how = f"on {found.device}, {threads}; medians and spreads between quartiles"
        if found.source == "analytic":
            how = f"estimated for {found.device}"
        console = output.console()
        console.print(f"{len(found.layers)} layers {how}; passes in milliseconds")
        console.print(table(found))


def table(profile: Profile) -> Table:
    """One row per run of equal layers and size."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, show_edge=False)
    made.add_column("layers", style="bold", no_wrap=True)
    for name in ("samples", "F", "I", "W", "B", "output MB", "saved MB", "for W MB", "weights MB", "optimizer MB"):
        made.add_column(name, justify="right")
    for name, layer in _runs(profile):
        for at, size in enumerate(profile.sizes):
            passes = (_pass(op, at) for op in (layer.F, layer.I, layer.W, layer.B))
            by_size = (row[at] for row in (layer.output_bytes, layer.saved_bytes, layer.deferred_bytes))
            always = (layer.parameter_bytes, layer.optimizer_bytes)
            made.add_row(name if at == 0 else "", str(size), *passes, *(f"{n / 1e6:.3f}" for n in (*by_size, *always)))
    return made


def _pass(timing: Timing, at: int) -> str:
    spread = f" ±{1e3 * timing.spread[at]:.3f}" if any(timing.spread) else ""
    return f"{1e3 * timing.median[at]:.3f}{spread}"


def _runs(profile: Profile) -> Iterator[tuple[str, Layer]]:
    """Neighbours that are alike as one, under a name such as "1-4 Block"."""
    first = 0
    for layer, group in groupby(profile.layers):
        end = first + len(list(group))
        numbers = str(first) if end == first + 1 else f"{first}-{end - 1}"
        yield f"{numbers} {layer.name}", layer
        first = end
