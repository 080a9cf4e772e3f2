"""Whether a schedule that updates as it goes has its weight versions in time, few enough, and not too old."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import numpy as np

from pipeswift.ir import Action, Op, Schedule
from pipeswift.passes import links, rows_of
from pipeswift.verify.orders import action_at
from pipeswift.verify.violation import InvalidSchedule, Violation
from pipeswift.versions import Versions


def verify_versions(
    schedule: Schedule, plan: Versions, *, version_limit: int | None = None, staleness_limit: int | None = None
) -> list[Violation]:
    """Everything that is wrong with the versions of a schedule in which `verify` finds nothing.

    version_limit: the most versions of one stage that a rank may keep. staleness_limit: the most updates that may lie
    between the weights of a gradient and those it is applied to. Looked for besides: versions used before they are
    there, backwards of several routes that change places, and ranks with one stage that wait for ever to sum its
    gradients (messages taken to be never in the way).
    """
    found = [*_too_early(schedule, plan), *_out_of_turn(schedule)]
    found += [] if found else _reductions(schedule, plan)
    if version_limit is not None:
        found += _too_many(schedule, plan, version_limit)
    if staleness_limit is not None:
        found += _too_old(schedule, plan, staleness_limit)
    return found


def check_versions(
    schedule: Schedule, plan: Versions, *, version_limit: int | None = None, staleness_limit: int | None = None
) -> None:
    """Raise InvalidSchedule, with every violation, unless `verify_versions` finds none."""
    violations = verify_versions(schedule, plan, version_limit=version_limit, staleness_limit=staleness_limit)
    if violations:
        raise InvalidSchedule(f"{schedule.name} with weights {plan.policy}", violations)


def _too_early(schedule: Schedule, plan: Versions) -> Iterator[Violation]:
    """The first F of each stage that uses a version not yet published there."""
    for stage, early in enumerate(plan.forward > plan.newest):
        for microbatch in np.flatnonzero(early)[:1].tolist():
            action = Action(stage, Op.F, microbatch)
            used, newest = int(plan.forward[stage, microbatch]), int(plan.newest[stage, microbatch])
            text = f"{action} uses version {used} of its weights, and {newest} is the newest when it starts"
            yield Violation(schedule.rank_of(stage, microbatch), action, "versions", text)


def _too_many(schedule: Schedule, plan: Versions, limit: int) -> Iterator[Violation]:
    for rank, stage in sorted({(life.rank, life.stage) for life in plan.lives}):
        if (peak := plan.peak(rank, stage)) > limit:
            text = f"rank {rank} keeps {peak} versions of stage {stage}, and the limit is {limit}"
            yield Violation(rank, None, "versions", text)


def _too_old(schedule: Schedule, plan: Versions, limit: int) -> Iterator[Violation]:
    for stage, ages in enumerate(plan.staleness):
        for microbatch in np.flatnonzero(ages > limit)[:1].tolist():
            action = Action(stage, Op.F, microbatch)
            text = f"{action} uses weights that are {ages[microbatch]} updates old when its gradient is applied"
            yield Violation(
                schedule.rank_of(stage, microbatch), action, "versions", f"{text}, and the limit is {limit}"
            )


def _out_of_turn(schedule: Schedule) -> Iterator[Violation]:
    """The first backward of each stage of a rank that ends after one of a later micro-batch, on another route."""
    for rank, order in enumerate(schedule.orders):
        stages, ops, microbatches = order.rows.T
        for stage in sorted({stage for _, stage in schedule.stages_on(rank)}):
            closes = np.flatnonzero((stages == stage) & ((ops == Op.W) | (ops == Op.B)))
            for place in np.flatnonzero(np.diff(microbatches[closes]) < 0)[:1] + 1:
                action = Action(*order.rows[closes[place]].tolist())
                text = f"{action} comes after the backward of a later micro-batch, whose update would miss it"
                yield Violation(rank, action, "versions", text)


def _reductions(schedule: Schedule, plan: Versions) -> Iterator[Violation]:
    """After its last backward of an update a rank goes on only when the stage's other ranks have come to theirs.

    The parts of an Overlap count as one after the other, each with its product; the first waits for what both need.
    """
    if all(len(set(ranks)) == 1 for ranks in zip(*schedule.routes, strict=True)):
        return
    rows = rows_of(schedule)
    sorter: TopologicalSorter[int | str] = TopologicalSorter()
    _, makers, consumers = links(schedule, rows)
    first_part = np.searchsorted(rows.entry, rows.entry)
    for maker, consumer in zip(makers.tolist(), first_part[consumers].tolist(), strict=True):
        sorter.add(consumer, maker)
    goes_on = np.append(rows.rank[1:] == rows.rank[:-1], False)
    for row in np.flatnonzero(goes_on).tolist():
        sorter.add(row + 1, row)
    closes = np.flatnonzero((rows.op == Op.W) | (rows.op == Op.B)).tolist()
    last = {(rows.rank[row], rows.stage[row], rows.microbatch[row] // plan.every): row for row in closes}
    for (_, stage, update), row in last.items():
        total = f"the sum of update {update} over the ranks of stage {stage}"
        sorter.add(total, row)
        if goes_on[row]:
            sorter.add(row + 1, total)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = error.args[1]
        names = (node if isinstance(node, str) else str(action_at(rows, node)) for node in circle)
        row = next(node for node in circle if not isinstance(node, str))
        text = f"each of these waits for the one before: {', '.join(names)}"
        yield Violation(int(rows.rank[row]), action_at(rows, row), "deadlock", text)
