"""`pipeswift partition`: where to cut a model, so that the slowest rank is as fast as can be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
import typer

from pipeswift.cli import options, output, source
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule, loop, vee
from pipeswift.plan.partition import Layers, Machine, Partition, Problem, evaluate, in_flight, noam
from pipeswift.plan.partition import partition as solve

PLACEMENTS = {"loop": loop, "vee": vee}


class Place(StrEnum):
    loop = "loop"
    vee = "vee"


class Transfers(StrEnum):
    beside = "beside"
    within = "within"


class Objective(StrEnum):
    rank = "rank"
    stage = "stage"


def _list(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], list]:
    """The parser of numbers with commas between."""
    parse = options.number(kind, low, high)
    return lambda text: [parse(one) for one in text.split(",")]


def _numbers(flag: str, what: str, metavar: str, kind: type = float, low: float = 0.0, high: float = 1e18):
    return typer.Option(flag, parser=_list(kind, low, high), help=what, metavar=metavar)


def partition(
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="FILE", help="What layers cost, from `pipeswift profile`.")
    ] = None,
    size: Annotated[int | None, options.count("--size", "N", "The profile's micro-batch size; its first.")] = None,
    times: Annotated[Any, _numbers("--times", "Seconds of each layer, F and B together.", "T,T,...")] = None,
    bytes: Annotated[Any, _numbers("--bytes", "What each layer holds in memory; 0.", "B,B,...")] = None,
    output_bytes: Annotated[Any, _numbers("--output-bytes", "What each layer sends to the next; 0.", "B,B,...")] = None,
    pp: options.Ranks = None,
    chunks: options.Chunks = None,
    placement: Annotated[
        Place | None, typer.Option(help="Where chunks go: round and round (if not given), or V.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Its placement, and the activations that it has in flight; 1f1b."),
    ] = None,
    microbatches: options.Microbatches = None,
    speeds: Annotated[
        Any, _numbers("--speeds", "Of each rank; 1. A layer takes its time over this.", "S,S,...", low=1e-9)
    ] = None,
    memory: Annotated[
        Any, _numbers("--memory", "What a rank has, or each rank has, in bytes.", "M[,M,...]", low=1e-9)
    ] = None,
    bandwidth: Annotated[
        Any,
        _numbers("--bandwidth", "Bytes per second of one link; inside a host, between hosts.", "B[,B]", low=1e-9),
    ] = None,
    ranks_per_host: Annotated[int | None, options.count("--ranks-per-host", "N", "All on one, if not given.")] = None,
    transfers: Annotated[
        Transfers, typer.Option(help="Whether they go on beside the compute, or ranks wait for them within it.")
    ] = Transfers.beside,
    objective: Annotated[
        Objective, typer.Option(help="With chunks: the slowest rank, its stages together, or the slowest stage.")
    ] = Objective.rank,
    replicate: Annotated[
        bool, typer.Option("--replicate", help="Let a stage take several ranks, as asynchronous PipeDream does.")
    ] = False,
    together: Annotated[
        Any, _numbers("--together", "Layers that stay in one stage with the next.", "L,L,...", int)
    ] = None,
    apart: Annotated[Any, _numbers("--apart", "Layers that end a stage.", "L,L,...", int)] = None,
    layout: Annotated[
        Any, _numbers("--layout", "A cut of your own, to see its price: layers per stage.", "N,N,...", int, 1)
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help='Write the partition; "-" is standard output.')
    ] = None,
) -> None:
    """Cut layers into contiguous stages, none empty, so that the slowest rank is as fast as memory allows."""
    if pp is None:
        raise PipeSwiftError("--pp is missing: how many ranks are there? Add --pp 4, say.")
    if layout is not None and replicate:
        raise PipeSwiftError("--layout with --replicate does not say which stages have replicas. Use one of the two.")
    run = None if schedule is None else source.get(schedule, pp, microbatches, chunks)
    inside, between = _bandwidths(bandwidth)
    problem = Problem(
        _layers(profile, size, times, bytes, output_bytes, split=run is not None and run.splits_backward),
        Machine.of(
            pp,
            speeds=_or_one(speeds, 1.0),
            memory=_or_one(memory, math.inf),
            ranks_per_host=ranks_per_host,
            inside=inside,
            between=between,
        ),
        replicate=replicate,
        together=frozenset(together or ()),
        apart=frozenset(apart or ()),
        transfers=transfers.value,
        objective=objective.value,
        **_held(run, pp, chunks or 1, placement, replicate=replicate, counts=profile is not None),
    )
    found = solve(problem) if layout is None else evaluate(problem, layout)
    if json_file is not None:
        with output.opened(json_file, "--json") as file:
            json.dump(_written(found), file)
            file.write("\n")
    if json_file != "-":
        _show(found, problem)


def _layers(
    profile: str | None,
    size: int | None,
    times: list[float] | None,
    bytes: list[float] | None,
    output_bytes: list[float] | None,
    *,
    split: bool,
) -> Layers:
    if (profile is None) == (times is None):
        raise PipeSwiftError(
            "what the layers cost comes from --profile FILE or from --times T,T,...: give one of them."
        )
    if times is not None:
        if size is not None:
            raise PipeSwiftError("--size chooses among the micro-batch sizes of a --profile, and --times has none.")
        for flag, given in (("--bytes", bytes), ("--output-bytes", output_bytes)):
            if given is not None and len(given) not in (1, len(times)):
                raise PipeSwiftError(f"{flag} has {len(given)} numbers for {len(times)} --times. Give one, or as many.")
        return Layers.of(times, state_bytes=_or_one(bytes, 0.0), output_bytes=_or_one(output_bytes, 0.0))
    if bytes or output_bytes:
        raise PipeSwiftError("--bytes and --output-bytes go with --times: a --profile has its own. Leave them out.")
    from pipeswift.plan.profile import Profile

    return Layers.profiled(Profile.load(profile or ""), size, split=split)


def _held(
    run: Schedule | None, pp: int, chunks: int, placement: Place | None, *, replicate: bool, counts: bool
) -> dict[str, Any]:
    """The part of the problem that follows from how it is run: places, micro-batches in flight, versions.

    counts: whether the layers say what one micro-batch's activations take.
    """
    if replicate:
        if run is not None:
            raise PipeSwiftError(
                "--replicate is for asynchronous 1F1B, which --schedule cannot name. Use one of the two."
            )
        if chunks > 1:
            raise PipeSwiftError(f"--replicate takes one stage per rank: got --chunks {chunks}. Use one of the two.")
        return {"in_flight": noam(pp), "versions": noam(pp)}
    if run is not None:
        if placement is not None:
            raise PipeSwiftError(f"--schedule {run.name} has a placement of its own. Leave --placement out.")
        if len(set(run.routes)) > 1:
            raise PipeSwiftError(f"--schedule {run.name} has each stage on several ranks. Use one with it on one rank.")
        return {"rank_of": run.routes[0], "in_flight": in_flight(run)}
    if chunks == 1:
        return {"in_flight": noam(pp)[:, 0]}
    if counts:
        raise PipeSwiftError(
            f"--profile with --chunks {chunks}: what is in flight depends on the schedule, and none is given. Add "
            f"--schedule interleaved-1f1b --microbatches {2 * pp}, say."
        )
    place = PLACEMENTS[placement or Place.loop]
    return {"rank_of": tuple(place(stage, pp) for stage in range(pp * chunks))}


def _or_one(given: list[float] | None, default: float) -> float | list[float]:
    """What an option of one number for all, or one each, says."""
    if given is None:
        return default
    return given[0] if len(given) == 1 else given


def _bandwidths(given: list[float] | None) -> tuple[float, float | None]:
    if given is None:
        return math.inf, None
    if len(given) > 2:
        raise PipeSwiftError(f"--bandwidth takes one or two numbers: got {len(given)}. Use 1e9, or 1e10,1e9.")
    return given[0], given[-1]


def _written(found: Partition) -> dict[str, Any]:
    """JSON has no nan: the gap of a cut that was given is null."""
    return {**asdict(found), "layout": found.layout, "gap": None if math.isnan(found.gap) else found.gap}


def _show(found: Partition, problem: Problem) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for title in ("stage", "layers", "ranks", "seconds", "bytes"):
        table.add_column(title, justify="right")
    seats = np.cumsum([0, *(stage.replicas for stage in found.stages)])
    for number, (stage, seconds, held) in enumerate(
        zip(found.stages, found.stage_seconds, found.stage_bytes, strict=True)
    ):
        ranks = ", ".join(str(rank) for rank in problem.rank_of[seats[number] : seats[number + 1]])
        layers = f"{stage.first}-{stage.end - 1}" if stage.end - stage.first > 1 else str(stage.first)
        table.add_row(str(number), layers, ranks, f"{seconds:.4g}", f"{held:.4g}")
    console = output.console()
    console.print(table)
    slowest = "rank" if problem.chunks > 1 and problem.objective == "rank" else "stage"
    console.print(f"layout {','.join(map(str, found.layout))}; slowest {slowest} {found.bottleneck:.6g} s{_gap(found)}")


def _gap(found: Partition) -> str:
    if math.isnan(found.gap):
        return ""
    return f", at most {found.gap:.2%} from the best" if found.gap else ", and no cut has a faster one"
