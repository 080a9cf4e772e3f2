"""From a model and a schedule to what one rank holds: its stages, their weights, and the ties to other ranks."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import pipeswift
from pipeswift import codec, schedules
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.runtime.batch import Rules, check_rules
from pipeswift.runtime.channel import POOL
from pipeswift.runtime.layers import Layer, check_layout, even_layout, layers_of, materialise, warn_of_batch_statistics
from pipeswift.runtime.peers import Peers, agree
from pipeswift.runtime.stage import Segment, Stage
from pipeswift.runtime.ties import Tie, Ties, agree_on_ties, check_ties, found_in, merged, tie_locally
from pipeswift.runtime.weights import Weights
from pipeswift.verify import check


@dataclass(frozen=True)
class Request:
    """What the caller of `Pipeline` asked for."""

    schedule: str | Path | Schedule
    microbatches: int | None
    chunks: int | None
    layout: Sequence[int] | None
    tie: Ties
    split: Rules
    seed: int
    config: Mapping[str, object]


@dataclass(frozen=True)
class Assembly:
    """stages, weights: by stage index. ties: those that cross ranks. keywords: the arguments that some layer names."""

    schedule: Schedule
    layout: tuple[int, ...]
    stages: Mapping[int, Stage]
    weights: Mapping[int, Weights]
    ties: Sequence[Tie]
    keywords: frozenset[str]


def assemble(layers: nn.Module | Sequence[Layer], request: Request, peers: Peers) -> Assembly:
    """Builds this rank's part. All ranks agree on everything first, so an error on one of them is raised on all."""
    try:
        _check_kinds(request)
        schedule = resolve(request.schedule, peers.size, request.microbatches, request.chunks)
        check(schedule, receive_pool=POOL)
        _require_one_home(schedule)
        _require_flush(schedule)
        every_layer = layers_of(layers)
        layout = _layout(request.layout, len(every_layer), schedule.num_stages)
        ties = [*found_in(every_layer), *request.tie]
        check_ties(ties, len(every_layer))
        ties = merged(ties)
        stages = _build(every_layer, layout, schedule, ties, request.seed, peers)
        facts = _facts(schedule, layout, ties, request)
    except PipeSwiftError as error:
        agree(peers, {"error": str(error)})
        raise
    agree(peers, facts)
    weights = _weights_of(stages)
    mine = {name for stage in stages.values() for segment in stage.segments for took in segment.takes for name in took}
    keywords = frozenset().union(*peers.all_gather(mine))
    check_rules(request.split, keywords)
    return Assembly(
        schedule,
        layout,
        stages,
        weights,
        agree_on_ties(peers, ties, list(weights.values())),
        keywords,
    )


def _check_kinds(request: Request) -> None:
    """Refuses what would otherwise fail far from here, and on some ranks only."""
    numbers = {"microbatches": request.microbatches, "chunks": request.chunks, "seed": request.seed}
    layout = () if request.layout is None else request.layout
    for setting, value in numbers.items():
        if not isinstance(value, int) and (value is not None or setting == "seed"):
            raise PipeSwiftError(f"{setting} = {value!r} is no whole number: use {setting} = 1, say")
    if not isinstance(layout, Sequence) or not all(isinstance(size, int) for size in layout):
        raise PipeSwiftError(f"layout = {layout!r} is no list of whole numbers: give layers per stage, such as [2, 2]")
    if not isinstance(request.schedule, (str, Path, Schedule)):
        raise PipeSwiftError(
            f"schedule = {request.schedule!r} is no schedule: give a name such as '1f1b', a Schedule, or a file's path"
        )


def _require_one_home(schedule: Schedule) -> None:
    for stage, ranks in enumerate(zip(*schedule.routes, strict=True)):
        if len(set(ranks)) > 1:
            raise PipeSwiftError(
                f"schedule {schedule.name} puts stage {stage} on ranks {sorted(set(ranks))}, and copies of a stage are "
                "not kept equal yet: use a schedule with each stage on one rank"
            )


def _require_flush(schedule: Schedule) -> None:
    if not schedule.flush:
        raise PipeSwiftError(
            f"schedule {schedule.name} updates weights while micro-batches are in flight, which this runtime cannot: "
            "use a schedule that flushes, such as 1f1b"
        )


def resolve(schedule: str | Path | Schedule, ranks: int, microbatches: int | None, chunks: int | None) -> Schedule:
    """The schedule that a name, a file or a Schedule stands for; the other settings must fit it."""
    if isinstance(schedule, str) and not schedule.endswith((".csv", ".json")):
        if microbatches is None:
            raise PipeSwiftError(
                f"schedule {schedule!r} needs a number of micro-batches: pass, for example, microbatches={2 * ranks}"
            )
        try:
            return schedules.build(schedule, ranks, microbatches, chunks)
        except schedules.ScheduleError as error:  # which speaks of command line options
            raise schedules.ScheduleError(str(error).replace("--", "")) from error
    found = schedule if isinstance(schedule, Schedule) else codec.load(schedule)
    for setting, given, has in (
        ("pp", ranks, found.num_ranks),
        ("microbatches", microbatches, found.num_microbatches),
        ("chunks", chunks, found.chunks),
    ):
        if given is not None and given != has:
            raise PipeSwiftError(f"schedule {found.name} has {setting} = {has}, but {setting} = {given} was asked for")
    return found


def _layout(layout: Sequence[int] | None, layers: int, stages: int) -> tuple[int, ...]:
    return even_layout(layers, stages) if layout is None else check_layout(layout, layers, stages)


def _build(
    layers: Sequence[Layer], layout: Sequence[int], schedule: Schedule, ties: Ties, seed: int, peers: Peers
) -> dict[int, Stage]:
    ranges = {}
    for _, stage in schedule.stages_on(peers.rank):
        first = sum(layout[:stage])
        ranges[stage] = range(first, first + layout[stage])
    modules = {i: materialise(layers[i], i, seed, peers.device) for mine in ranges.values() for i in mine}
    tie_locally(modules, ties)
    if schedule.num_microbatches > 1:
        for i, module in modules.items():
            warn_of_batch_statistics(module, i)
    return {
        stage: Stage(stage, [Segment([modules[i] for i in mine], mine.start, peers.device)])
        for stage, mine in ranges.items()
    }


def _weights_of(stages: Mapping[int, Stage]) -> dict[int, Weights]:
    """Each stage's parameters; one that several layers of this rank share belongs to the first."""
    seen: set[int] = set()
    weights = {}
    for index, stage in stages.items():
        mine = []
        for name, parameter in stage.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                mine.append((name, parameter))
        weights[index] = Weights(mine)
    return weights


def _facts(schedule: Schedule, layout: Sequence[int], ties: Ties, request: Request) -> dict[str, str]:
    """What must be equal on all ranks, by name."""
    python = platform.python_version()
    count = schedule.num_microbatches
    return {
        "versions": f"pipeswift {pipeswift.__version__}, torch {torch.__version__}, Python {python}",
        "schedule": f"{schedule.name}, {count} micro-batches ({schedule.fingerprint[:12]})",
        "layout": str(list(layout)),
        "tied weights": str([list(group) for group in ties]),
        "split": str(dict(sorted(request.split.items()))),
        "seed": str(request.seed),
        **{f"setting {name}": repr(value) for name, value in request.config.items()},
    }
