"""How the copies of a pipeline start equal: every replica gets the weights of the first one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from pipeswift.runtime.groups import Group
from pipeswift.runtime.peers import Peers, agree
from pipeswift.runtime.stage import Stage
from pipeswift.runtime.ties import form


def experts_of(layers: Mapping[int, nn.Module]) -> frozenset[str]:
    """The global names of parameters of modules with a true attribute `expert_parallel`. layers: by index.

    Replicas of one expert group hold different ones under these names, and they are reduced over dp / ep ranks.
    """
    return frozenset(
        name
        for index, layer in layers.items()
        for path, module in layer.named_modules(prefix=str(index))
        if getattr(module, "expert_parallel", False)
        for name, _ in module.named_parameters(prefix=path)
    )


def equalise(peers: Peers, stages: Mapping[int, Stage], experts: frozenset[str]) -> None:
    """Gives every replica the first one's parameters and buffers; of experts, those of its expert group's first copy.

    Raises Disagreement, on every rank, when replicas have built different ones. Every rank must call this.
    """
    if peers.replicas.size == 1:
        return
    tensors = dict(_tensors(stages))
    dense = {name: tensor for name, tensor in tensors.items() if name not in experts}
    apart = {name: tensor for name, tensor in tensors.items() if name in experts}
    everywhere, copies = peers.replicas.control, peers.replicas.expert_replicas
    odd = _difference(everywhere, dense) or _difference(copies, apart)
    agree(peers, {"error": odd} if odd else {})
    for group, mine in ((everywhere, dense), (copies, apart)):
        for tensor in mine.values():
            _spread(group, tensor)


def _tensors(stages: Mapping[int, Stage]) -> Iterator[tuple[str, Tensor]]:
    for stage in stages.values():
        for index, layer in stage.numbered_layers():
            yield from chain(layer.named_parameters(prefix=str(index)), layer.named_buffers(prefix=str(index)))


def _difference(group: Group, tensors: Mapping[str, Tensor]) -> str:
    """What is not alike on all ranks of the group; empty when all is."""
    everyone: Sequence[dict[str, str]] = group.all_gather({name: form(tensor) for name, tensor in tensors.items()})
    first = everyone[0]
    for replica, theirs in enumerate(everyone):
        for name in first | theirs:
            if first.get(name) != theirs.get(name):
                return (
                    f"replicas have built different layers: {name} is {first.get(name, 'missing')} on the first and "
                    f"{theirs.get(name, 'missing')} on number {replica}; build every replica's layers alike"
                )
    return ""


def _spread(group: Group, tensor: Tensor) -> None:
    data = tensor.detach().reshape(-1).contiguous()
    group.spread(data.view(torch.uint8))  # whatever the dtype, the transport has one for its bits
    with torch.no_grad():
        tensor.copy_(data.view_as(tensor))
