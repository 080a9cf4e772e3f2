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
    there, and ranks with one stage that wait for ever to sum its gradients (messages taken to be never in the way).
    """
    found = [*_too_early(schedule, plan), *_reductions(schedule, plan)]
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


def _reductions(schedule: Schedule, plan: Versions) -> Iterator[Violation]:
    """After its last backward of an update a rank goes on only when the stage's other ranks have come to theirs."""
    if all(len(set(ranks)) == 1 for ranks in zip(*schedule.routes, strict=True)):
        return
    rows = rows_of(schedule)
    sorter: TopologicalSorter[int | str] = TopologicalSorter()
    _, maker, consumer = links(schedule, rows)
    for before, after in zip(rows.entry[maker].tolist(), rows.entry[consumer].tolist(), strict=True):
        sorter.add(after, before)
    rank_of = dict(zip(rows.entry.tolist(), rows.rank.tolist(), strict=True))
    for entry, rank in rank_of.items():
        if rank_of.get(entry + 1) == rank:
            sorter.add(entry + 1, entry)
    closes = (rows.op == Op.W) | (rows.op == Op.B)
    own = zip(
        *(column[closes].tolist() for column in (rows.rank, rows.stage, rows.microbatch, rows.entry)), strict=True
    )
    last = {(rank, stage, microbatch // plan.every): entry for rank, stage, microbatch, entry in own}
    for (rank, stage, update), entry in last.items():
        total = f"the sum of update {update} over the ranks of stage {stage}"
        sorter.add(total, entry)
        if rank_of.get(entry + 1) == rank:
            sorter.add(entry + 1, total)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = error.args[1]
        row = {entry: at for at, entry in enumerate(rows.entry.tolist())}
        names = (node if isinstance(node, str) else str(action_at(rows, row[node])) for node in circle)
        first = next(row[node] for node in circle if not isinstance(node, str))
        text = f"each of these waits for the one before: {', '.join(names)}"
        yield Violation(int(rows.rank[first]), action_at(rows, first), "deadlock", text)
