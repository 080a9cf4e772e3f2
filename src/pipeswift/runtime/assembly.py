"""From a model and a schedule to what one rank holds: its stages, their weights, and the ties to other ranks."""

from __future__ import annotations

import platform
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn

import pipeswift
from pipeswift import codec, schedules
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.program import WHOLE, Grain
from pipeswift.runtime.asynchronous import Asynchronous, plan_of
from pipeswift.runtime.batch import Rules, check_rules
from pipeswift.runtime.channel import POOL
from pipeswift.runtime.context import building_for
from pipeswift.runtime.cuts import build_stage, grain_of
from pipeswift.runtime.layers import Layer, check_layout, even_layout, layers_of, materialise, warn_of_batch_statistics
from pipeswift.runtime.peers import Peers, agree
from pipeswift.runtime.replication import equalise, experts_of
from pipeswift.runtime.stage import Stage
from pipeswift.runtime.ties import Tie, TieError, Ties, agree_on_ties, check_ties, found_in, merged, tie_locally
from pipeswift.runtime.weights import Weights
from pipeswift.verify import check
from pipeswift.versions import WeightPolicy


@dataclass(frozen=True)
class Request:
    """What the caller of `Pipeline` asked for. accepts: raises PipeSwiftError for a schedule that will not do."""

    schedule: str | Path | Schedule
    microbatches: int | None
    chunks: int | None
    layout: Sequence[int] | None
    tie: Ties
    split: Rules
    seed: int
    config: Mapping[str, object]
    weights: WeightPolicy | None = None
    updates_every: int | None = None
    expert_chunks: int | tuple[int, int] | str = 1
    bucket: int = 1 << 22
    accepts: Callable[[Schedule], None] = lambda schedule: None

    @property
    def policy(self) -> WeightPolicy:
        return self.weights or "stash"

    @property
    def every(self) -> int:
        return 1 if self.updates_every is None else self.updates_every

    @property
    def grain(self) -> Grain | None:
        """None: to be found by measurement. Raises PipeSwiftError when `expert_chunks` says nothing of the kind."""
        return grain_of(self.expert_chunks)


@dataclass(frozen=True)
class Assembly:
    """stages, weights: by stage index. ties: what several ranks hold. keywords: the arguments that some layer names.

    asynchronous: for a schedule without flush. auxiliary_losses: whether some layer has losses of its own.
    """

    schedule: Schedule
    layout: tuple[int, ...]
    stages: Mapping[int, Stage]
    weights: Mapping[int, Weights]
    ties: Sequence[Tie]
    keywords: frozenset[str]
    asynchronous: Asynchronous | None
    auxiliary_losses: bool

    def require_mean(self) -> None:
        """Raises PipeSwiftError when some layer has a loss of its own, for a loss function that gives (sum, count)."""
        if self.auxiliary_losses:
            raise PipeSwiftError(
                "loss gives (sum, count), but layers such as MoE have losses of their own, which are means over "
                "micro-batches: return a mean, or set their coefficients (balance, z) to 0"
            )


def assemble(layers: nn.Module | Sequence[Layer], request: Request, peers: Peers) -> Assembly:
    """Builds this rank's part. All ranks agree on everything first, so an error on one of them is raised on all."""
    try:
        _check_kinds(request)
        schedule = resolve(request.schedule, peers.size, request.microbatches, request.chunks)
        check(schedule, receive_pool=POOL)
        request.accepts(schedule)
        _check_updates(schedule, request, peers.replicas.size)
        every_layer = layers_of(layers)
        layout = _layout(request.layout, len(every_layer), schedule.num_stages)
        ties = [*found_in(every_layer), *request.tie]
        check_ties(ties, len(every_layer))
        ties = merged(ties)
        _refuse_ties_across_stages(schedule, layout, ties)
        stages = _build(every_layer, layout, schedule, ties, request.seed, request.grain or WHOLE, peers)
        if not schedule.flush:
            _refuse_hooks(stages)
        facts = _facts(schedule, layout, ties, request)
    except PipeSwiftError as error:
        agree(peers, {"error": str(error)})
        raise
    agree(peers, facts)
    experts = experts_of({i: layer for stage in stages.values() for i, layer in stage.numbered_layers()})
    equalise(peers, stages, experts)
    weights = _weights_of(stages, experts)
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
        None if schedule.flush else Asynchronous(stages, weights, request.policy, request.every),
        any(peers.all_gather(any(stage.auxiliary.losses for stage in stages.values()))),
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
    if not isinstance(request.split, Mapping):
        raise PipeSwiftError(
            f'split = {request.split!r} is no dict: give the dimension of each argument, {{"mask": 0}}'
        )
    if not isinstance(request.tie, Sequence):
        raise PipeSwiftError(f'tie = {request.tie!r} is no list of groups: use [("0.weight", "5.weight")], say')
    if not isinstance(request.bucket, int) or request.bucket < 1:
        raise PipeSwiftError(f"bucket = {request.bucket!r} is no whole number from 1: use {1 << 22} numbers, say")
    grain_of(request.expert_chunks)


def _check_updates(schedule: Schedule, request: Request, replicas: int) -> None:
    """A schedule that flushes has no choice of versions, and one that does not gets a plan that can run."""
    if not schedule.flush:
        plan_of(schedule, request.policy, request.every)
        if replicas > 1:
            raise PipeSwiftError(
                f"schedule {schedule.name} updates weights inside a step, where dp = {replicas} replicas do not reduce "
                "their gradients: use dp = 1, or a schedule that flushes, such as 1f1b"
            )
        if request.config.get("batched_weight_gradients"):
            raise PipeSwiftError(
                f"batched_weight_gradients = True joins W of several micro-batches, and with {schedule.name} each may "
                "belong to another version of the weights: use False, or a schedule that flushes"
            )
    elif request.weights is not None or request.updates_every is not None:
        setting = "weights" if request.weights is not None else "updates_every"
        raise PipeSwiftError(
            f"{setting} = {getattr(request, setting)!r} is for schedules that update within a step, and "
            f"{schedule.name} flushes before it updates: use schedule pipedream, or leave {setting} out"
        )


def _refuse_ties_across_stages(schedule: Schedule, layout: Sequence[int], ties: Ties) -> None:
    ends = list(accumulate(layout))
    for group in ties:
        stages = sorted({bisect_right(ends, int(name.partition(".")[0])) for name in group})
        if not schedule.flush and len(stages) > 1:
            raise TieError(
                f"tied weights {', '.join(group)} are on stages {', '.join(map(str, stages))}, and stages that update "
                f"on their own have no moment when one weight could get the gradients of all: with {schedule.name}, "
                "untie them, put their layers on one stage by layout, or use a schedule that flushes, such as 1f1b"
            )


def _refuse_hooks(stages: Mapping[int, Stage]) -> None:
    for name, weight in (named for stage in stages.values() for named in stage.named_parameters()):
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            raise PipeSwiftError(
                f"parameter {name} has a hook on its gradient, and without flush gradients are those of its versions: "
                "remove the hook, or use a schedule that flushes, such as 1f1b"
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
    layers: Sequence[Layer],
    layout: Sequence[int],
    schedule: Schedule,
    ties: Ties,
    seed: int,
    grain: Grain,
    peers: Peers,
) -> dict[int, Stage]:
    ranges = {}
    for _, stage in schedule.stages_on(peers.rank):
        first = sum(layout[:stage])
        ranges[stage] = range(first, first + layout[stage])
    experts = peers.replicas.experts
    with building_for(experts.rank, experts.size):
        modules = {i: materialise(layers[i], i, seed, peers.device) for mine in ranges.values() for i in mine}
    tie_locally(modules, ties)
    if schedule.num_microbatches > 1:
        for i, module in modules.items():
            warn_of_batch_statistics(module, i)
    return {
        stage: build_stage(stage, {i: modules[i] for i in mine}, experts, grain, peers.device)
        for stage, mine in ranges.items()
    }


def _weights_of(stages: Mapping[int, Stage], experts: frozenset[str]) -> dict[int, Weights]:
    """Each stage's parameters; one that several layers of this rank share belongs to the first."""
    seen: set[int] = set()
    weights = {}
    for index, stage in stages.items():
        mine = []
        for name, parameter in stage.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                mine.append((name, parameter))
        weights[index] = Weights(mine, experts.intersection(name for name, _ in mine))
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
        "weight versions": "none" if schedule.flush else f"{request.policy}, an update every {request.every}",
        "chunks of experts": str(request.grain),
        "bucket": str(request.bucket),
        **{f"setting {name}": repr(value) for name, value in request.config.items()},
    }
