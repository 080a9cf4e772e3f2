"""Whether a schedule may run: complete, in order, within memory, and free of deadlock."""

from __future__ import annotations

from pipeswift.ir import Schedule
from pipeswift.passes import rows_of
from pipeswift.verify import deadlock, orders
from pipeswift.verify.collectives import check_collectives, verify_collectives
from pipeswift.verify.orders import peak_activations
from pipeswift.verify.updates import check_versions, verify_versions
from pipeswift.verify.violation import InvalidSchedule, Violation

__all__ = [
    "InvalidSchedule",
    "Violation",
    "check",
    "check_collectives",
    "check_versions",
    "peak_activations",
    "verify",
    "verify_collectives",
    "verify_versions",
]


def verify(schedule: Schedule, *, receive_pool: int = 2, memory_limit: float | None = None) -> list[Violation]:
    """Everything that is wrong with the schedule; an empty list is a proof that it runs to its end.

    receive_pool: receive buffers of each channel (boundary, direction, route); 0 means that a send waits until its
        receiver has come to the action that takes the message.
    memory_limit: the most activations a rank may hold, in units of one rank's share of the model for one micro-batch.

    Looked for, one after the other: actions on a rank that does not hold their stage, missing and repeated actions,
    micro-batches out of order, too much memory, and, in a complete schedule, ranks that wait for themselves or for
    each other for ever.
    """
    if receive_pool < 0:
        raise ValueError(f"receive_pool must be at least 0: got {receive_pool}")
    if misshapen := list(orders.shape(schedule)):
        return misshapen
    rows = rows_of(schedule)
    found = [*orders.placement(schedule, rows), *orders.completeness(schedule, rows)]
    incomplete = bool(found)
    found += orders.micro_batch_order(schedule, rows)
    if memory_limit is not None:
        found += orders.memory(schedule, rows, memory_limit)
    if not incomplete:
        found += list(deadlock.waits_for_itself(schedule, rows)) or deadlock.waits_in_a_circle(
            schedule, rows, receive_pool
        )
    return found


def check(schedule: Schedule, *, receive_pool: int = 2, memory_limit: float | None = None) -> None:
    """Raise InvalidSchedule, with every violation, unless `verify` finds none."""
    if violations := verify(schedule, receive_pool=receive_pool, memory_limit=memory_limit):
        raise InvalidSchedule(schedule.name, violations)
