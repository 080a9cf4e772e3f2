"""What an action is made of: steps over lanes.

A dense stage's forward is: take the input, compute, send the output. An MoE stage's has all-to-alls between its
segments. Cutting a step into chunks, or merging two programs, rewrites the list of steps; who runs them need not know.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from pipeswift.ir import Action, Op
from pipeswift.trace import ALL_TO_ALL, COMPUTE, POINT_TO_POINT


class Lane(IntEnum):
    """What a step keeps busy; steps of different lanes may run at the same time."""

    COMPUTE = COMPUTE
    ALL_TO_ALL = ALL_TO_ALL
    POINT_TO_POINT = POINT_TO_POINT


class Kind(IntEnum):
    TAKE = 0  # wait for a message and own it
    COMPUTE = 1  # run one segment's F, I, W or B
    SEND = 2  # hand a message over, without waiting for its delivery


class Step(NamedTuple):
    kind: Kind
    lane: Lane
    segment: int  # which segment of the stage; for TAKE and SEND the one the message enters or leaves


class Program(NamedTuple):
    action: Action
    steps: tuple[Step, ...]


def compile_action(action: Action, *, segments: int, takes: bool, sends: bool) -> Program:
    """The program of one action of a stage with `segments` segments.

    takes, sends: whether its input comes from, and its output goes to, another stage (first and last stages lack one).
    Forward goes through the segments upwards, backward downwards; W neither takes nor sends.
    """
    path = range(segments) if action.op is Op.F else range(segments - 1, -1, -1)
    steps = [Step(Kind.COMPUTE, Lane.COMPUTE, segment) for segment in path]
    if takes and action.op is not Op.W:
        steps.insert(0, Step(Kind.TAKE, Lane.POINT_TO_POINT, path[0]))
    if sends and action.op is not Op.W:
        steps.append(Step(Kind.SEND, Lane.POINT_TO_POINT, path[-1]))
    return Program(action, tuple(steps))
