"""From a stage's layers to its segments: where ranks share out a layer's experts, the stage is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipeswift.errors import PipeSwiftError
from pipeswift.program import Grain
from pipeswift.runtime.exchange import Exchange, divisible_parts
from pipeswift.runtime.groups import Group
from pipeswift.runtime.seeds import mix
from pipeswift.runtime.stage import Named, Segment, Stage


def grain_of(setting: Any) -> Grain | None:
    """The setting `expert_chunks`: a number for forward and backward, or a pair; None for "auto".

    Raises PipeSwiftError for anything else.
    """
    if setting == "auto":
        return None
    pair = setting if isinstance(setting, tuple) else (setting, setting)
    if len(pair) == 2 and all(isinstance(number, int) and number >= 1 for number in pair):
        return Grain(*pair)
    raise PipeSwiftError(
        f"expert_chunks = {setting!r} is no number of chunks: use 1, or (2, 1), say, for forward and backward, "
        'or "auto"'
    )


def build_stage(index: int, layers: Mapping[int, nn.Module], group: Group, grain: Grain, device: torch.device) -> Stage:
    """A stage of these layers, by their number in the model. group: the ranks that share out experts."""
    members = [member for number, layer in layers.items() for member in _parts(number, layer)]
    found: list[tuple[str, Any]] = []
    for member in members:
        for name, part in divisible_parts(member.layer):
            part.settle(group.rank, group.size)
            found.append((f"{member.name}.{name}".rstrip("."), part))
            if name and group.size > 1:
                raise PipeSwiftError(
                    f"layer {member.name} has experts to share out over ep = {group.size} ranks inside, in its part "
                    f"{name!r}, where its all-to-alls cannot be scheduled: make the layer an nn.Sequential in which "
                    "the mixture of experts stands by itself"
                )
    segments, exchanges = _cut(members, group, grain, device) if group.size > 1 else ([Segment(members, device)], [])
    stage = Stage(index, layers, segments, exchanges, grain)
    for name, part in found:
        part.report(stage.auxiliary, name)
    return stage


def _parts(number: int, layer: nn.Module) -> Iterator[Named]:
    """The layer; of an nn.Sequential with experts its parts, also where nobody shares them: so random numbers are the
    same either way."""
    if isinstance(layer, nn.Sequential) and any(True for _ in divisible_parts(layer)):
        for place, (name, part) in enumerate(layer.named_children()):
            yield Named(f"{number}.{name}", mix(number, place), part)
    else:
        yield Named(str(number), number, layer)


def _cut(
    members: Sequence[Named], group: Group, grain: Grain, device: torch.device
) -> tuple[list[Segment], list[Exchange]]:
    segments, exchanges, gathered = [], [], []
    for member in members:
        layer: Any = member.layer
        if not getattr(layer, "divisible", False):
            gathered.append(member)
            continue
        divided = layer.divide(member.name, group, grain)
        gathered.append(Named(f"{member.name}.inlet", member.number, divided.inlet))
        outlet = Named(f"{member.name}.outlet", member.number, divided.outlet)
        segments += Segment(gathered, device), Segment([outlet], device)
        exchanges.append(divided.exchange)
        gathered = []
    if gathered:
        segments.append(Segment(gathered, device))
    return segments, exchanges
