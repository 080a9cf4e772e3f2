"""The vocabulary of programs: works, what each one needs, and the steps that a host takes to get them done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from pipeswift.ir import Action, Op
from pipeswift.trace import ALL_TO_ALL, COMPUTE, POINT_TO_POINT


class Lane(IntEnum):
    """What a work keeps busy; works of different lanes may run at the same time, those of one lane never do."""

    COMPUTE = COMPUTE
    ALL_TO_ALL = ALL_TO_ALL
    POINT_TO_POINT = POINT_TO_POINT


class Part(IntEnum):
    """Which part of a segment a work is; with op I or B it is that part's backward."""

    LAYERS = 0  # a dense segment, whole
    ATTENTION = 1  # what comes before the experts of a block: attention, norm, router
    COUNTS = 2  # all-to-all: how many tokens go from each rank to each expert
    DISPATCH = 3  # all-to-all: tokens to their experts; backward, their gradients come home
    EXPERTS = 4
    COMBINE = 5  # all-to-all: what experts made comes home; backward, its gradients go to the experts
    SHARED = 6  # the expert that every token passes, on its own rank
    MERGE = 7  # adds up what the experts made, weighted, and the residual
    INPUT = 8  # point to point: from the stage before, or backward from the stage after
    OUTPUT = 9  # point to point: to the next stage


_LANES = {
    Part.COUNTS: Lane.ALL_TO_ALL,
    Part.DISPATCH: Lane.ALL_TO_ALL,
    Part.COMBINE: Lane.ALL_TO_ALL,
    Part.INPUT: Lane.POINT_TO_POINT,
    Part.OUTPUT: Lane.POINT_TO_POINT,
}


class Work(NamedTuple):
    """One thing that keeps one lane busy; unique in its program.

    action: the pass that it belongs to. op: F, I, W or B, its own; a B may be made of works with op I and W.
    chunk, chunks: which of how many pieces, counted by groups of the rank's experts; `chunks.LOCAL` is one besides.
    """

    action: Action
    part: Part
    segment: int  # of the stage; for INPUT and OUTPUT the one that the message enters or leaves
    op: Op
    chunk: int = 0
    chunks: int = 1

    @property
    def lane(self) -> Lane:
        return _LANES.get(self.part, Lane.COMPUTE)

    def __str__(self) -> str:
        """As in "2F0 experts[1/4]"; a part of a B says its own op, too: "2B0 experts.W"."""
        own = "" if self.op is self.action.op else f".{self.op.name}"
        piece = "[local]" if self.chunk < 0 else f"[{self.chunk}/{self.chunks}]" if self.chunks > 1 else ""
        return f"{self.action} {self.part.name.lower()}{own}{piece}"


class Kind(IntEnum):
    """What the host does in a step."""

    TAKE = 0  # waits for a message and owns it
    COMPUTE = 1  # runs the work
    SEND = 2  # hands a message over, without waiting for its delivery
    LAUNCH = 3  # queues the work on its lane
    WAIT = 4  # waits until the launched work is done


class Step(NamedTuple):
    kind: Kind
    work: Work

    @property
    def lane(self) -> Lane:
        return self.work.lane


@dataclass(frozen=True)
class Program:
    """Steps in the order in which the host takes them, and what each work comes after.

    Launched works of one lane run one after the other, in the order of their launches: ranks that run the same program
    issue collectives in the same order.
    """

    steps: tuple[Step, ...]
    after: Mapping[Work, tuple[Work, ...]]

    @property
    def works(self) -> tuple[Work, ...]:
        """Every work, in the order in which it is started."""
        return tuple(step.work for step in self.steps if step.kind is not Kind.WAIT)

    def on(self, lane: Lane) -> Iterator[Work]:
        """The works of one lane, in their order."""
        return (work for work in self.works if work.lane is lane)


def issue(order: Iterable[Work], after: Mapping[Work, tuple[Work, ...]]) -> Program:
    """The program that starts works in `order`, which must respect `after`.

    The host waits for a launched work when, and not before, it starts one that comes after it; that holds for launches
    too, since the host has to know the counts before it can launch a dispatch. At the end it waits for what is left.
    """
    steps: list[Step] = []
    launched: list[Work] = []
    for work in order:
        for earlier in after[work]:
            if earlier in launched:
                steps.append(Step(Kind.WAIT, earlier))
                launched.remove(earlier)
        kind = kind_of(work)
        steps.append(Step(kind, work))
        if kind is Kind.LAUNCH:
            launched.append(work)
    steps += (Step(Kind.WAIT, work) for work in launched)
    return Program(tuple(steps), after)


def kind_of(work: Work) -> Kind:
    """How the host starts `work`."""
    if work.lane is Lane.POINT_TO_POINT:
        return Kind.TAKE if work.part is Part.INPUT else Kind.SEND
    return Kind.COMPUTE if work.lane is Lane.COMPUTE else Kind.LAUNCH
