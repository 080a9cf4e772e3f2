"""The compiled loop of a replay. Importing it imports Numba; its machine code is cached on disk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from pipeswift.simulate.prefetch import prefetch
from pipeswift.simulate.tables import NONE, Dependencies, Links

# Indices are unsigned throughout, which spares the check for negative ones; so are the numbers added to them.
ONE, TWO = np.uint64(1), np.uint64(2)
COLUMNS = np.uint64(3)
AHEAD = np.uint64(32)  # rows; with many ranks each one's memory has left the cache by its next turn


class Orders(NamedTuple):
    """All ranks' orders end to end.

    rows: uint32, shape (actions, 3), columns stage, op, microbatch. joined: bool, shape (actions,), true at the first
    row of an Overlap. offsets: uint64, shape (ranks + 1,), where each rank's rows begin. route_of: uint32, the route of
    each micro-batch.
    """

    rows: np.ndarray
    joined: np.ndarray
    offsets: np.ndarray
    route_of: np.ndarray


class Work(NamedTuple):
    """The arguments of `play`."""

    orders: Orders
    dependencies: Dependencies
    links: Links
    seconds: np.ndarray  # as in Costs
    overlap: np.ndarray  # seconds of an Overlap, as `Costs.pairs`
    arrival: np.ndarray  # scratch, all NaN: when each product of each stage and micro-batch is where it is needed
    start: np.ndarray  # to fill, seconds, one per row
    end: np.ndarray


@njit(cache=True)
def play(orders, dependencies, links, seconds, overlap, arrival, start, end):
    """Fill `start` and `end`, and return, for each rank, the row that it got to; the arguments are those of Work.

    A rank runs until it misses something and is woken by the arrival of just that, so the work is in proportion to the
    actions.
    """
    rows, joined, offsets, route_of = orders
    makes, needs, elsewhere = dependencies
    receivers, transfers, latencies, channels = links
    flat_rows = rows.reshape(-1)
    num_ranks = len(offsets) - 1
    at = offsets[:-1].copy()
    clock = np.zeros(num_ranks)
    channel_free = np.zeros(num_ranks * num_ranks)
    waits_for = np.full(num_ranks, NONE)
    awake = np.arange(num_ranks)[::-1].astype(np.uint64)  # a stack; each rank is in it, or waits, or is done
    depth = num_ranks
    overlaps, varies = joined.any(), seconds.shape[2] > 1
    while depth:
        depth -= 1
        rank = awake[depth]
        row, stop, now = at[rank], offsets[rank + ONE], clock[rank]
        while row < stop:
            after = row + (TWO if overlaps and joined[row] else ONE)
            now, missing = _when_ready(rows, needs, elsewhere, arrival, row, after, now)
            if missing != NONE:
                waits_for[rank] = missing
                break
            prefetch(flat_rows, (row + AHEAD) * COLUMNS)
            prefetch(start, row + AHEAD)
            begin, together = now, _together(rows, row, overlap) if after - row == TWO else np.nan
            woven = not np.isnan(together)
            for part in range(row, after):
                stage, op, microbatch = rows[part, 0], rows[part, 1], rows[part, 2]
                start[part] = begin if woven else now
                now = start[part] + (together if woven else seconds[op, stage, microbatch if varies else 0])
                if makes[op, stage] == NONE:
                    continue
                key = makes[op, stage] + microbatch
                prefetch(arrival, key + AHEAD)
                route = route_of[microbatch]
                receiver = receivers[route, op, stage]
                if receiver == NONE:
                    arrival[key] = now
                    continue
                sent = now + transfers[route, op, stage]
                channel = channels[route, op, stage]
                if channel != NONE:
                    sent = max(now, channel_free[channel]) + transfers[route, op, stage]
                    channel_free[channel] = sent
                arrival[key] = sent + latencies[route, op, stage]
                if waits_for[receiver] == key:
                    waits_for[receiver] = NONE
                    awake[depth] = receiver
                    depth += 1
            row = after
        at[rank], clock[rank] = row, now
    _finish(rows, joined, seconds, overlap, start, end)
    return at


@njit(cache=True, inline="always")
def _when_ready(rows, needs, elsewhere, arrival, row, after, now):
    """(when the entry in rows row..after may start, given that its rank is free from `now`; the key it misses)."""
    missing = NONE
    for part in range(row, after):
        stage, op, microbatch = rows[part, 0], rows[part, 1], rows[part, 2]
        for k in range(needs.shape[2]):
            if needs[op, stage, k] == NONE:
                continue
            key = needs[op, stage, k] + microbatch
            time = arrival[key]
            if np.isnan(time):
                missing = key
                break
            if not elsewhere[op, k]:
                prefetch(arrival, key + AHEAD)  # the time itself does not matter: made here, it was there before
            elif time > now:
                now = time
    return now, missing


@njit(cache=True)
def _finish(rows, joined, seconds, overlap, start, end):
    """The ends, from the starts: one stream through memory, where `play` jumps from rank to rank."""
    varies = seconds.shape[2] > 1
    for row in range(len(rows)):
        stage, op, microbatch = rows[row, 0], rows[row, 1], rows[row, 2]
        together = np.nan
        if joined[row]:
            together = _together(rows, row, overlap)
        elif row > 0 and joined[row - 1]:
            together = _together(rows, row - 1, overlap)
        woven = not np.isnan(together)
        end[row] = start[row] + (together if woven else seconds[op, stage, microbatch if varies else 0])


@njit(cache=True, inline="always")
def _together(rows, row, overlap):
    """Seconds of the Overlap whose parts are rows row and row + 1."""
    shared = len(overlap) == 1
    return overlap[0 if shared else rows[row, 0], 0 if shared else rows[row + 1, 0]]
