"""Parameters of the model of which several ranks hold copies.

Tied weights, which several layers use, such as embedding and head, and all weights of a stage that is on several
ranks, each tied to itself. On one rank a parameter is one tensor. Copies start equal and stay equal: their gradients
are summed, in the order of the tie's names, then of ranks, before the optimizer steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.groups import traffic
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.reduction import Member, reduce
from pipeswift.runtime.weights import Weights

Ties = Sequence[Sequence[str]]  # groups of global parameter names


class TieError(PipeSwiftError):
    """A tie names parameters that do not exist or do not match."""


@dataclass(frozen=True)
class Tie:
    """One parameter with copies. names: in the order given. holders: its name on each rank that has one, by rank."""

    names: tuple[str, ...]
    holders: Mapping[int, str]

    @property
    def ranks(self) -> list[int]:
        """The holders, in the order of `names`, then by rank; sums go over them in that order."""
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
            _require_alike([(mine[0], form(first)), (mine[-1], form(getattr(module, attribute)))])
            setattr(module, attribute, first)


def agree_on_ties(peers: Peers, groups: Ties, weights: Sequence[Weights]) -> list[Tie]:
    """The parameters of which several ranks hold copies, the same list on every rank.

    Those of `groups`, and those of stages that are on several ranks. The copies are set to the first holder's values.
    Every rank must call this, with the same groups.
    """
    mine = {name: leaf for version in weights for name, leaf in version.leaves.items()}
    everyone = peers.all_gather({name: form(leaf) for name, leaf in mine.items()})
    tied = set(chain(*groups))
    others = [[name] for name in dict.fromkeys(chain(*everyone)) if name not in tied]
    ties = []
    for group in [*groups, *others]:
        _require_alike([(name, theirs[name]) for theirs in everyone for name in group if name in theirs])
        held = {rank: name for rank, theirs in enumerate(everyone) for name in reversed(group) if name in theirs}
        if len(held) > 1:
            ties.append(Tie(tuple(group), held))
    for tie in ties:
        if (name := tie.holders.get(peers.rank)) is not None:
            copies = _exchange(peers, tie.ranks, mine[name].detach())
            with torch.no_grad():
                mine[name].copy_(copies[min(tie.holders)])
    return ties


def form(parameter: Tensor) -> str:
    """What copies of a parameter must have in common."""
    training = "trained" if parameter.requires_grad else "frozen"
    return f"{list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}, {training}"


def _require_alike(forms: Sequence[tuple[str, str]]) -> None:
    """Refuses to tie parameters of different forms. forms: (name, form) of each."""
    for name, form in forms:
        first, expected = forms[0]
        if form != expected and name == first:
            raise TieError(
                f"two ranks hold {name}, as {expected} and as {form}: build the layers of a stage alike on all ranks"
            )
        if form != expected:
            raise TieError(
                f"tied weights {first} and {name} are {expected} and {form}: tie parameters of one shape and dtype, "
                "all trained or all frozen"
            )


def sum_gradients(peers: Peers, ties: Sequence[Tie], weights: Sequence[Weights]) -> None:
    """Every copy gets the sum of the copies' gradients, if any has one. Every rank that holds one must call this."""
    member_of = {name: Member(version, name) for version in weights for name in version.leaves}
    together: dict[tuple[tuple[int, ...], torch.dtype], list[Member]] = defaultdict(list)
    for tie in ties:
        name = tie.holders.get(peers.rank)
        if name is not None and (member := member_of[name]).leaf.requires_grad:
            together[tuple(tie.ranks), member.dtype].append(member)
    for (ranks, _), members in together.items():
        reduce(members, partial(_fold, peers, ranks))


def _fold(peers: Peers, ranks: Sequence[int], mine: Tensor) -> Tensor:
    """The sum over `ranks`, a left fold in their order."""
    copies = _exchange(peers, ranks, mine)
    total = copies[ranks[0]].clone()
    for rank in ranks[1:]:
        total.add_(copies[rank])
    return total


def _exchange(peers: Peers, ranks: Sequence[int], mine: Tensor) -> dict[int, Tensor]:
    """The tensors of all `ranks`, by rank."""
    assert peers.control is not None
    mine = mine.contiguous()
    copies = {rank: torch.empty_like(mine) for rank in ranks if rank != peers.rank}
    with traffic():
        # As bytes: the transport knows fewer dtypes than there are.
        works = [peers.control.recv([_bytes(copy)], rank, TAG) for rank, copy in copies.items()]
        works += [peers.control.send([_bytes(mine)], rank, TAG) for rank in copies]
        for work in works:
            work.wait()
    return copies | {peers.rank: mine}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


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
