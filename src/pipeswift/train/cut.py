"""Which layers each stage of a run gets: as the settings say, or by a profile that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.plan.profile import Profile
from pipeswift.runtime.layers import even_layout
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.progress import Progress
from pipeswift.runtime.watchdog import watch
from pipeswift.train.config import Config

_SECONDS = 1.0  # of measuring
_PATIENCE = 60.0


@dataclass(frozen=True)
class Cut:
    """layout: layers per stage. profile: what it follows from; None when the settings alone say."""

    layout: tuple[int, ...]
    profile: Profile | None = None


def agree_on_cut(config: Config, schedule: Schedule, peers: Peers) -> Cut:
    """The cut of a run, the same on all ranks; every one must call this. Rank 0 measures where a profile decides."""
    partition, stages = config.pipeline.partition, schedule.num_stages
    if not isinstance(partition, str):
        return Cut(partition)
    there_is_a_choice = 1 < stages < config.model.layers and len(schedule.routes) == 1
    if partition == "even" or not there_is_a_choice:
        return Cut(even_cut(config.model.blocks, stages))
    progress = Progress()
    watchdog = watch(peers, progress, _PATIENCE)
    try:
        with progress.during("cutting the model"):
            return _from_rank_0(config, schedule)
    finally:
        if watchdog:
            watchdog.close()


def cut_by(profile: Profile, schedule: Schedule, size: int) -> Cut:
    """The cut whose slowest rank is fastest, by what the profile says of micro-batches of `size` samples."""
    from pipeswift.plan.partition import Layers, layout  # slow to load, and only one rank needs it

    layers = Layers.profiled(profile, size, split=schedule.splits_backward)
    return Cut(layout(layers, schedule), profile)


def even_cut(blocks: int, stages: int) -> tuple[int, ...]:
    """Layers per stage. The blocks carry the work, so they are shared out evenly where there are enough of them;
    the embedding joins the first stage's and the head the last's."""
    if blocks < stages:
        return even_layout(blocks + 2, stages)
    sizes = list(even_layout(blocks, stages))
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


def _from_rank_0(config: Config, schedule: Schedule) -> Cut:
    """What rank 0 finds, or the error that it meets, on every rank."""
    box: list[Cut | PipeSwiftError | None] = [None]
    if dist.get_rank() == 0:
        from pipeswift.train import sample  # likewise

        size = config.microbatch
        try:
            profile = sample.measured(config, [size], optimizer=None, seconds=_SECONDS)
            box = [cut_by(profile, schedule, size)]
        except PipeSwiftError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], PipeSwiftError):
        raise box[0]
    assert box[0] is not None
    return box[0]
