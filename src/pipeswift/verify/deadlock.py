"""Whether the ranks of a complete schedule can all reach the end, and the circle they wait in if not.

The model: when an entry ends, its rank sends its messages in order and blocks until each is accepted. A channel
(boundary, direction, route) has a pool of receive buffers; a message is accepted into a free one, which becomes free
again when the entry that takes the message starts. Without a pool it is accepted once the receiver has come to that
entry.

So a rank's work is a list of steps, takes and sends, and each step waits for one thing: that one other rank has passed
a certain number of its own. A step that may pass stays so, whatever the others do: one run decides for all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipeswift.ir import Product, Schedule
from pipeswift.passes import Rows, Transfers, links, transfers
from pipeswift.verify.orders import action_at
from pipeswift.verify.violation import Violation


def waits_for_itself(schedule: Schedule, rows: Rows) -> Iterator[Violation]:
    """No rank starts an entry that needs what the same rank makes only later."""
    _, maker, consumer = links(schedule, rows)
    late = (rows.rank[maker] == rows.rank[consumer]) & (rows.entry[maker] >= rows.entry[consumer])
    for used, made in sorted(zip(consumer[late].tolist(), maker[late].tolist(), strict=True)):
        rank, action, needed = int(rows.rank[used]), action_at(rows, used), action_at(rows, made)
        text = f"rank {rank} at {action} waits for {needed}, which it comes to only later itself"
        yield Violation(rank, action, "deadlock", text)


def waits_in_a_circle(schedule: Schedule, rows: Rows, receive_pool: int) -> Iterator[Violation]:
    """No ranks wait for each other; that no rank waits for itself is assumed."""
    steps = _steps(schedule, rows)
    stuck_at = _run(steps, _sends_wait(steps, receive_pool))
    if stuck_at is None:
        return

    def enough(pool: int) -> bool:
        return _run(steps, _sends_wait(steps, pool)) is None

    most = schedule.num_microbatches
    if enough(most):
        least = bisect_left(range(most), True, lo=receive_pool + 1, key=enough)
        moral = f"a receive pool of {receive_pool} is too small for this schedule, {least} is enough"
    else:
        moral = "no receive pool is large enough, since the actions themselves need each other"
    yield _explain(steps, rows, stuck_at, receive_pool, moral)


class _Steps(NamedTuple):
    """What the ranks of a schedule do with messages; arrays over messages unless said otherwise.

    Positions count a rank's steps from 0. Step k of the concatenation of all ranks' steps takes message
    `arrangement[k]`, or, from `len(messages)` on, sends the message of that number less `len(messages)`.
    """

    messages: Transfers
    channel: np.ndarray
    take: np.ndarray  # position of its take on the destination
    send: np.ndarray  # position of its send on the source
    come: np.ndarray  # position at which the destination has come to the entry that takes it
    start: np.ndarray  # position at which that entry has started
    arrangement: np.ndarray  # shape (steps,)
    first: np.ndarray  # shape (ranks + 1,): where each rank's steps start in the arrangement


def _steps(schedule: Schedule, rows: Rows) -> _Steps:
    messages = transfers(schedule)
    count = len(messages)
    row = np.concatenate([messages.consumer, messages.maker])
    # Takes of an entry before its sends, the first part of an Overlap before the second.
    arrangement = np.lexsort((row, np.repeat([0, 1], count), rows.entry[row]))
    rank = rows.rank[row]
    first = np.searchsorted(rank[arrangement], np.arange(schedule.num_ranks + 1))
    position = np.empty(2 * count, dtype=np.int64)
    position[arrangement] = np.arange(2 * count)
    position -= first[rank]
    take, send = position[:count], position[count:]
    entry = rows.entry[messages.consumer]
    come = np.full(len(rows.entry), 2 * count)
    start = np.zeros(len(rows.entry), dtype=np.int64)
    np.minimum.at(come, entry, take)
    np.maximum.at(start, entry, take + 1)
    route = np.array(schedule.route_of)[messages.microbatch]
    channel = np.ravel_multi_index(
        (messages.product, route, messages.boundary), (len(Product), len(schedule.routes), schedule.num_stages)
    )
    return _Steps(messages, channel, take, send, come[entry], start[entry], arrangement, first)


class _SendsWait(NamedTuple):
    """When each message's send passes: once the destination's position is `until`.

    freed_by: the message whose take gives it room, -1 when there is room from the start; without a pool, itself.
    """

    until: np.ndarray
    freed_by: np.ndarray


def _sends_wait(steps: _Steps, pool: int) -> _SendsWait:
    if pool == 0:
        return _SendsWait(steps.come, np.arange(len(steps.messages)))
    until, freed_by = np.zeros_like(steps.come), np.full(len(steps.messages), -1)
    sent = np.lexsort((steps.send, steps.channel))[pool:]
    taken = np.lexsort((steps.take, steps.channel))[:-pool]
    same = steps.channel[sent] == steps.channel[taken]
    until[sent[same]] = steps.start[taken[same]]
    freed_by[sent[same]] = taken[same]
    return _SendsWait(until, freed_by)


def _run(steps: _Steps, sends: _SendsWait) -> list[int] | None:
    """Let every rank go as far as it can: None if all finish, else the position of each rank."""
    peer, until = _conditions(steps, sends)
    position = [0] * len(peer)
    waiting: list[list[int]] = [[] for _ in peer]  # by the rank they wait for
    movable = list(range(len(peer)))
    while movable:
        rank = movable.pop()
        peers, untils, at = peer[rank], until[rank], position[rank]
        while at < len(peers) and position[peers[at]] >= untils[at]:
            at += 1
        if at < len(peers):
            waiting[peers[at]].append(rank)
        if at > position[rank]:
            position[rank] = at
            movable += waiting[rank]
            waiting[rank] = []
    return None if all(at == len(peers) for at, peers in zip(position, peer, strict=True)) else position


def _conditions(steps: _Steps, sends: _SendsWait) -> tuple[list[list[int]], list[list[int]]]:
    """Per rank and step: the rank it waits for, and the position that one must have."""
    messages = steps.messages
    peer = np.concatenate([messages.source, messages.destination])[steps.arrangement]
    until = np.concatenate([steps.send + 1, sends.until])[steps.arrangement]
    cuts = steps.first[1:-1]
    return [part.tolist() for part in np.split(peer, cuts)], [part.tolist() for part in np.split(until, cuts)]


def _explain(steps: _Steps, rows: Rows, stuck_at: list[int], pool: int, moral: str) -> Violation:
    messages, sends_wait = steps.messages, _sends_wait(steps, pool)
    peer, _ = _conditions(steps, sends_wait)

    def stuck(rank: int) -> tuple[bool, int]:
        """Whether the rank is stuck in a send, and with which message."""
        sends, message = divmod(int(steps.arrangement[steps.first[rank] + stuck_at[rank]]), len(messages))
        return bool(sends), message

    def sentence(rank: int) -> str:
        sends, message = stuck(rank)
        maker, consumer = (action_at(rows, at[message]) for at in (messages.maker, messages.consumer))
        other = peer[rank][stuck_at[rank]]
        if not sends:
            return f"rank {rank} at {consumer} waits for {maker} from rank {other}"
        if pool == 0:
            return f"rank {rank} after {maker} waits to send it until rank {other} comes to {consumer}"
        frees = action_at(rows, messages.consumer[sends_wait.freed_by[message]])
        return f"rank {rank} after {maker} waits to send it until rank {other} starts {frees} and frees a buffer"

    unfinished = [rank for rank, at in enumerate(stuck_at) if at < len(peer[rank])]
    circle = _circle({rank: peer[rank][stuck_at[rank]] for rank in unfinished})
    sends, message = stuck(circle[0])
    action = action_at(rows, (messages.maker if sends else messages.consumer)[message])
    return Violation(circle[0], action, "deadlock", f"{'; '.join(map(sentence, circle))}: {moral}")


def _circle(waits_for: dict[int, int]) -> list[int]:
    """The ranks of one circle, each waiting for the next, the lowest first."""
    path = [min(waits_for)]
    while waits_for[path[-1]] not in path:
        path.append(waits_for[path[-1]])
    circle = path[path.index(waits_for[path[-1]]) :]
    lowest = circle.index(min(circle))
    return circle[lowest:] + circle[:lowest]
