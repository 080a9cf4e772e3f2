"""From an action to its program, whole: nothing in chunks, nothing woven."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import partial

from pipeswift.ir import Action, Op
from pipeswift.program.steps import Part, Program, Work, issue

After = dict[Work, tuple[Work, ...]]  # in the order of its keys, a program


class Form(IntEnum):
    """What a segment of a stage is."""

    DENSE = 0
    MOE = 1  # attention and router, then experts that live on several ranks
    MOE_SHARED = 2  # with a shared expert besides


def compile_action(action: Action, *, layout: Sequence[Form], takes: bool, sends: bool) -> Program:
    """The program of one action of a stage whose segments have the forms of `layout`.

    takes, sends: whether its input comes from, and its output goes to, another stage (first and last stages lack one).
    Forward goes through the segments upwards, backward downwards; W neither takes nor sends. In a B the experts' W are
    works of their own, so that they can hide communication; everything else does both halves at once.
    """
    path = range(len(layout)) if action.op is Op.F else range(len(layout) - 1, -1, -1)
    after: After = {}
    last: tuple[Work, ...] = ()
    if takes and action.op is not Op.W:
        last = _add(after, Work(action, Part.INPUT, path[0], action.op))
    for segment in path:
        last = _SEGMENTS[action.op](after, last, action, segment, layout[segment])
    if sends and action.op is not Op.W:
        _add(after, Work(action, Part.OUTPUT, path[-1], action.op), last)
    return issue(after, after)


def _add(after: After, work: Work, needs: tuple[Work, ...] = ()) -> tuple[Work, ...]:
    after[work] = needs
    return (work,)


# One function per op: adds a segment's works and returns those that make its result.


def _forward(after: After, last: tuple[Work, ...], action: Action, segment: int, form: Form) -> tuple[Work, ...]:
    work = partial(Work, action, segment=segment, op=Op.F)
    if form is Form.DENSE:
        return _add(after, work(Part.LAYERS), last)
    routed = _add(after, work(Part.ATTENTION), last)
    counted = _add(after, work(Part.COUNTS), routed)
    arrived = _add(after, work(Part.DISPATCH), routed + counted)
    shared = _add(after, work(Part.SHARED), routed) if form is Form.MOE_SHARED else ()
    made = _add(after, work(Part.EXPERTS), arrived)
    home = _add(after, work(Part.COMBINE), made)
    return _add(after, work(Part.MERGE), home + shared)


def _backward(after: After, last: tuple[Work, ...], action: Action, segment: int, form: Form) -> tuple[Work, ...]:
    work = partial(Work, action, segment=segment)
    if form is Form.DENSE:
        return _add(after, work(Part.LAYERS, op=action.op), last)
    parted = _add(after, work(Part.MERGE, op=Op.I), last)
    arrived = _add(after, work(Part.COMBINE, op=Op.I), parted)
    shared = _add(after, work(Part.SHARED, op=action.op), parted) if form is Form.MOE_SHARED else ()
    made = _add(after, work(Part.EXPERTS, op=Op.I), arrived)
    home = _add(after, work(Part.DISPATCH, op=Op.I), made)
    if action.op is Op.B:
        _add(after, work(Part.EXPERTS, op=Op.W), made)
    return _add(after, work(Part.ATTENTION, op=action.op), home + shared)


def _weights(after: After, last: tuple[Work, ...], action: Action, segment: int, form: Form) -> tuple[Work, ...]:
    parts = {
        Form.DENSE: (Part.LAYERS,),
        Form.MOE: (Part.EXPERTS, Part.ATTENTION),
        Form.MOE_SHARED: (Part.SHARED, Part.EXPERTS, Part.ATTENTION),
    }
    for part in parts[form]:
        _add(after, Work(action, part, segment, Op.W))
    return last


_SEGMENTS = {Op.F: _forward, Op.I: _backward, Op.W: _weights, Op.B: _backward}
