"""The reduction of gradients over replicas, bucket by bucket, in a thread of its own while the step goes on.

A stage's buckets go when its last weight gradient is done, so that they travel while other stages drain. All replicas
reduce in one order, that in which the schedule is done with the stages, and of each element the sum is a left fold by
replica: its bits depend neither on the buckets nor on the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeswift.ir import Action, Op, Schedule
from pipeswift.program import Lane
from pipeswift.runtime.groups import Group, Replicas
from pipeswift.runtime.lanes import Lanes, Launched
from pipeswift.runtime.recorder import Recorder
from pipeswift.runtime.stage import Stage
from pipeswift.runtime.weights import Weights


class Member(NamedTuple):
    """One parameter of a bucket."""

    weights: Weights
    name: str

    @property
    def leaf(self) -> Tensor:
        return self.weights.leaves[self.name]

    @property
    def elements(self) -> int:
        """Real numbers in its gradient."""
        return self.leaf.numel() * (2 if self.leaf.is_complex() else 1)

    @property
    def dtype(self) -> torch.dtype:
        """Of those numbers."""
        return torch.float64 if self.leaf.dtype in (torch.float64, torch.complex128) else torch.float32

    def numbers(self) -> Tensor | None:
        """Its gradient as real numbers, in one dimension."""
        gradient = self.weights.gradient(self.name)
        if gradient is None:
            return None
        dense = gradient.to_dense() if gradient.is_sparse else gradient.resolve_conj()
        return (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)

    def replace(self, numbers: Tensor) -> None:
        """Makes `numbers` its gradient, without a copy."""
        shape = self.leaf.shape
        complex_ = self.leaf.is_complex()
        gradient = torch.view_as_complex(numbers.view(*shape, 2)) if complex_ else numbers.view(shape)
        self.weights.set_gradient(self.name, gradient)


class Bucket(NamedTuple):
    """Gradients that are reduced together, number `number` of its stage."""

    stage: int
    number: int
    group: Group
    members: tuple[Member, ...]

    def reduce(self) -> None:
        reduce(self.members, self.group.fold)


def reduce(members: Sequence[Member], fold: Callable[[Tensor], Tensor]) -> None:
    """Puts the sum over ranks in the place of each gradient. fold: from this rank's numbers to the sum over ranks.

    With them goes one number per parameter that tells whether it has a gradient: where only some ranks have one, the
    others' count as zeros, and where none has, there is none afterwards either.
    """
    sizes = [*(member.elements for member in members), len(members)]
    first = members[0]
    flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.leaf.device)
    *places, flags = flat.split(sizes)
    for number, (place, member) in enumerate(zip(places, members, strict=True)):
        if (numbers := member.numbers()) is not None:
            place.copy_(numbers)
            flags[number] = 1
    *places, flags = fold(flat).split(sizes)
    for place, found, member in zip(places, flags.tolist(), members, strict=True):
        if found:
            member.replace(place)


def done_order(schedule: Schedule, rank: int) -> list[int]:
    """The stages on a rank, in the order in which their last weight gradients come."""
    last: dict[int, int] = {}
    for number, (stage, op, _) in enumerate(schedule.orders[rank].rows.tolist()):
        if op in (Op.B, Op.W):
            last[stage] = number
    return sorted(last, key=last.__getitem__)


def buckets_of(
    order: Sequence[int], stages: Mapping[int, Stage], weights: Iterable[Weights], replicas: Replicas, elements: int
) -> dict[int, list[Bucket]]:
    """Every parameter to train in one bucket, by the stage after which it goes. order: see `done_order`.

    elements: numbers in a bucket; a parameter that has more is one by itself. None where there are no replicas.
    """
    members = {id(leaf): Member(w, name) for w in weights for name, leaf in w.leaves.items() if leaf.requires_grad}
    # A parameter that stages of this rank share has its gradient when the last of them is done.
    last_user = {id(leaf): stage for stage in order for _, leaf in stages[stage].named_parameters()}
    due: dict[int, list[Bucket]] = {stage: [] for stage in order}
    for key, member in members.items():
        stage = last_user[key]
        experts = member.name in member.weights.experts
        group = replicas.expert_replicas if experts else replicas.gradients
        if group.size > 1:
            _append(due[stage], stage, group, member, elements)
    return due


def _append(buckets: list[Bucket], stage: int, group: Group, member: Member, elements: int) -> None:
    """Puts a member into the latest bucket of its kind that has room, or into a new one."""
    for number in reversed(range(len(buckets))):
        bucket = buckets[number]
        if bucket.group is group and bucket.members[0].dtype == member.dtype:
            if sum(other.elements for other in bucket.members) + member.elements <= elements:
                buckets[number] = bucket._replace(members=(*bucket.members, member))
                return
            break
    buckets.append(Bucket(stage, len(buckets), group, (member,)))


class Reducer:
    """Runs one rank's reductions. buckets: by stage, in the order in which the stages are reduced."""

    def __init__(self, buckets: Mapping[int, Sequence[Bucket]]):
        self.buckets = buckets
        self._lanes = Lanes()  # its own, or reductions and passes would wait for each other
        self._due: list[int] = []  # stages of this step whose buckets have not gone, in order
        self._done: set[int] = set()
        self._launched: list[tuple[Action, Launched]] = []

    def begin(self) -> None:
        """A step starts."""
        self._due, self._done, self._launched = list(self.buckets), set(), []

    def stage_done(self, stage: int) -> None:
        """The gradients of this stage are complete on this rank: its buckets go, once those before it have gone."""
        self._done.add(stage)
        while self._due and self._due[0] in self._done:
            for bucket in self.buckets[self._due.pop(0)]:
                action = Action(bucket.stage, Op.W, bucket.number)
                self._launched.append((action, self._lanes.launch(Lane.ALL_TO_ALL, bucket.reduce)))

    def finish(self, recorder: Recorder) -> None:
        """Waits until the step's gradients are sums over replicas, and records when each bucket was reduced: as W of
        its stage, with its number in place of a micro-batch's. Raises what ended a reduction."""
        for action, launched in self._launched:
            launched.wait()
            recorder.add(Lane.ALL_TO_ALL, action, launched.start, launched.end)

    def close(self) -> None:
        """Ends the thread. Only between steps."""
        self._lanes.close()
