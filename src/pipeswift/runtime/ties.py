"""Tied weights: one parameter of the model that several layers use, such as embedding and head.

On one rank it is one tensor. Layers on different ranks hold copies that start equal and stay equal: their gradients are
summed, in the order of the tie's names, before the optimizer steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.groups import traffic
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.weights import Weights

Ties = Sequence[Sequence[str]]  # groups of global parameter names


class TieError(PipeSwiftError):
    """A tie names parameters that do not exist or do not match."""


@dataclass(frozen=True)
class Tie:
    """One tied parameter. names: in the order given. holders: for each rank with a copy, the name it goes by there."""

    names: tuple[str, ...]
    holders: Mapping[int, str]

    @property
    def ranks(self) -> list[int]:
        """The holders, in the order of `names`; sums go over them in that order."""
        return sorted(self.holders, key=lambda rank: self.names.index(self.holders[rank]))


def found_in(layers: Sequence[object]) -> list[list[str]]:
    """Ties already made: parameters that several modules of the list share."""
    names: dict[int, list[str]] = defaultdict(list)
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            for name, parameter in layer.named_parameters(prefix=str(index), remove_duplicate=False):
                names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def check_ties(groups: Ties, layers: int) -> None:
    """Refuses names that point to no layer, and a group of fewer than two."""
    for group in groups:
        if len(group) < 2:
            raise TieError(
                f"tie {list(group)} needs at least two names, for example ['0.weight', '{layers - 1}.weight']"
            )
        for name in group:
            index = name.partition(".")[0]
            if not index.isdecimal() or int(index) >= layers:
                raise TieError(
                    f"tied weight {name!r} must start with a layer's index, 0 to {layers - 1}, for example '0.weight'"
                )


def merged(groups: Ties) -> list[list[str]]:
    """The same ties, in groups that share no name: what is tied to one of a group is tied to all of it."""
    apart: list[list[str]] = []
    for group in groups:
        touched = [earlier for earlier in apart if not set(earlier).isdisjoint(group)]
        apart = [earlier for earlier in apart if earlier not in touched]
        apart.append(list(dict.fromkeys(name for part in (*touched, group) for name in part)))
    return apart


def tie_locally(modules: Mapping[int, nn.Module], groups: Ties) -> None:
    """Makes the parameters of each group one tensor, as far as this rank holds them. modules: by layer index."""
    for group in groups:
        mine = [name for name in group if int(name.partition(".")[0]) in modules]
        owners = [_owner(modules, name) for name in mine]
        for module, attribute in owners[1:]:
            first = getattr(*owners[0])
            _require_alike({mine[0]: form(first), mine[-1]: form(getattr(module, attribute))})
            setattr(module, attribute, first)


def agree_on_ties(peers: Peers, groups: Ties, weights: Sequence[Weights]) -> list[Tie]:
    """The ties that cross ranks, the same list on every rank. Their copies are set to the first holder's values.

    Every rank must call this, with the same groups.
    """
    mine = {name: leaf for version in weights for name, leaf in version.leaves.items()}
    everyone = peers.all_gather([{name: form(mine[name]) for name in group if name in mine} for group in groups])
    ties = []
    for number, group in enumerate(groups):
        _require_alike({name: form for theirs in everyone for name, form in theirs[number].items()})
        held = {rank: next(iter(theirs[number])) for rank, theirs in enumerate(everyone) if theirs[number]}
        if len(held) > 1:
            ties.append(Tie(tuple(group), held))
    for tie in ties:
        for version in weights:
            name = tie.holders.get(peers.rank)
            if name in version.leaves:
                leaf = version.leaves[name]
                copies = _exchange(peers, tie, leaf.detach())
                with torch.no_grad():
                    leaf.copy_(copies[min(tie.holders)])
    return ties


def form(parameter: Tensor) -> str:
    """What copies of a parameter must have in common."""
    training = "trained" if parameter.requires_grad else "frozen"
    return f"{list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}, {training}"


def _require_alike(forms: Mapping[str, str]) -> None:
    """Refuses to tie parameters of different forms. forms: by name."""
    names = list(forms)
    for name in names:
        if forms[name] != forms[names[0]]:
            raise TieError(
                f"tied weights {names[0]} and {name} are {forms[names[0]]} and {forms[name]}: tie parameters of one "
                "shape and dtype, all trained or all frozen"
            )


def sum_gradients(peers: Peers, ties: Sequence[Tie], weights: Sequence[Weights]) -> None:
    """Every copy gets the sum of the copies' gradients. Every rank must call this."""
    for tie in ties:
        for version in weights:
            name = tie.holders.get(peers.rank)
            if name not in version.leaves or not version.leaves[name].requires_grad:
                continue
            gradient = version.gradient(name)
            copies = _exchange(peers, tie, torch.zeros_like(version.leaves[name]) if gradient is None else gradient)
            version.set_gradient(name, _fold([copies[rank] for rank in tie.ranks]))


def _fold(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total


def _exchange(peers: Peers, tie: Tie, mine: Tensor) -> dict[int, Tensor]:
    """The tensors of all holders, by rank."""
    assert peers.control is not None
    copies = {rank: torch.empty_like(mine) for rank in tie.holders if rank != peers.rank}
    with traffic():
        works = [peers.control.recv([copy], rank, TAG) for rank, copy in copies.items()]
        works += [peers.control.send([mine.contiguous()], rank, TAG) for rank in copies]
        for work in works:
            work.wait()
    return copies | {peers.rank: mine}


TAG = 1  # on the control group, apart from everything else there


def _owner(modules: Mapping[int, nn.Module], name: str) -> tuple[nn.Module, str]:
    index, _, path = name.partition(".")
    parent, _, attribute = path.rpartition(".")
    try:
        module = modules[int(index)].get_submodule(parent)
        if not isinstance(getattr(module, attribute), nn.Parameter):
            raise AttributeError(f"{attribute} is no parameter")
    except AttributeError as error:
        known = ", ".join(n for n, _ in modules[int(index)].named_parameters(prefix=index))
        raise TieError(f"tied weight {name!r} does not exist: layer {index} has {known or 'no parameters'}") from error
    return module, attribute
