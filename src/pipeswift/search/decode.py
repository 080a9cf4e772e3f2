"""The compiled loop that turns a pattern of forwards and input gradients into orders, putting weight gradients in gaps.

Importing it imports Numba; its machine code is cached on disk.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeswift.simulate.tables import NONE

F, I, W = 0, 1, 2  # noqa: E741


@njit(cache=True)
def decode(pattern, rules, dependencies, links, seconds, memory, limit, reserve, orders):
    """Fill `orders`, shape (ranks, actions of a rank, 3), and return the ranks' first starts and last ends.

    pattern: the fields of Pattern; rules: the fields of Rules. An infinite end says that the pattern cannot keep the
    limit. Ranks run until they miss something, and are woken by its arrival, as in the replay. A gap before the next
    pass is thus known when it is filled.
    """
    forwards, backwards, ahead = pattern
    makes, needs, elsewhere = dependencies
    receivers, transfers, latencies, _ = links
    ranks, passes = forwards.shape
    arrival = np.full(2 * seconds.shape[1] * seconds.shape[2], np.nan)
    done = np.zeros((ranks, 3), dtype=np.int64)  # F, I and W of each rank
    clock, level, idle = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    first = np.full(ranks, np.nan)
    waits_for = np.full(ranks, NONE)
    obliged = np.zeros(ranks, dtype=np.bool_)  # to do an I where the pattern wants an F that cannot come
    awake = np.arange(ranks)[::-1].copy()
    depth = ranks
    while True:
        while depth:
            depth -= 1
            rank = awake[depth]
            while done[rank, F] < passes or done[rank, I] < passes:
                op = _next_op(rank, done, ahead, obliged)
                if not _make_room(rank, op, pattern, done, clock, level, seconds, memory, limit, reserve, orders):
                    op = I
                    if done[rank, I] == passes:
                        break
                    _make_room(rank, op, pattern, done, clock, level, seconds, memory, limit, reserve, orders)
                code = (forwards if op == F else backwards)[rank, done[rank, op]]
                stage, microbatch = code // seconds.shape[2], code % seconds.shape[2]
                when, missing = _arrival(needs, elsewhere, arrival, op, stage, microbatch)
                waits_for[rank] = missing
                if missing != NONE:
                    break
                if not np.isnan(first[rank]):
                    _fill_gap(rank, when, rules, backwards, done, clock, level, idle, seconds, memory, orders)
                else:
                    first[rank] = max(when, clock[rank])
                end = _run(rank, op, stage, microbatch, when, done, clock, level, seconds, memory, orders)
                obliged[rank] = False
                key = makes[op, stage] + np.uint64(microbatch)
                receiver = receivers[0, op, stage]
                if receiver == NONE:
                    arrival[key] = end
                else:
                    arrival[key] = end + transfers[0, op, stage] + latencies[0, op, stage]
                    if waits_for[receiver] == key:
                        waits_for[receiver] = NONE
                        awake[depth] = receiver
                        depth += 1
        if (done[:, :2] == passes).all():
            break
        depth = _oblige(awake, obliged, done, backwards, needs, elsewhere, arrival, seconds.shape[2])
        for rank in awake[:depth]:
            waits_for[rank] = NONE
        if not depth:
            return first, np.full(ranks, np.inf)
    for rank in range(ranks):
        while done[rank, W] < passes:
            _run_weight(rank, backwards, done, clock, level, seconds, memory, orders)
    return first, clock


@njit(cache=True, inline="always")
def _next_op(rank, done, ahead, obliged):
    passes = ahead.shape[1]
    if done[rank, F] == passes:
        return I
    if done[rank, I] == passes:
        return F
    return F if done[rank, F] < ahead[rank, done[rank, I]] and not obliged[rank] else I


@njit(cache=True, inline="always")
def _arrival(needs, elsewhere, arrival, op, stage, microbatch):
    """(when the inputs of a pass are there, the key of the first that is not under way yet)."""
    when = 0.0
    for k in range(needs.shape[2]):
        if needs[op, stage, k] != NONE:
            key = needs[op, stage, k] + np.uint64(microbatch)
            if np.isnan(arrival[key]):
                return when, key
            if elsewhere[op, k]:
                when = max(when, arrival[key])
    return when, NONE


@njit(cache=True)
def _run(rank, op, stage, microbatch, when, done, clock, level, seconds, memory, orders):
    """One pass, as soon as its inputs are there; returns its end."""
    place = done[rank].sum()
    orders[rank, place, 0], orders[rank, place, 1], orders[rank, place, 2] = stage, op, microbatch
    done[rank, op] += 1
    clock[rank] = max(clock[rank], when) + seconds[op, stage, microbatch]
    level[rank] += memory[op, stage]
    return clock[rank]


@njit(cache=True)
def _run_weight(rank, backwards, done, clock, level, seconds, memory, orders):
    code = backwards[rank, done[rank, W]]
    stage, microbatch = code // seconds.shape[2], code % seconds.shape[2]
    _run(rank, W, stage, microbatch, 0.0, done, clock, level, seconds, memory, orders)


@njit(cache=True)
def _make_room(rank, op, pattern, done, clock, level, seconds, memory, limit, reserve, orders):
    """Weight gradients, while the next pass does not fit into memory without; whether it does now.

    After a forward there stays a reserve for what an input gradient may add.
    """
    forwards, backwards, _ = pattern
    stage = (forwards if op == F else backwards)[rank, done[rank, op]] // seconds.shape[2]
    needed = max(memory[op, stage], 0.0) + (reserve[rank] if op == F else 0.0)
    while level[rank] + needed > limit and done[rank, W] < done[rank, I]:
        _run_weight(rank, backwards, done, clock, level, seconds, memory, orders)
    return level[rank] + needed <= limit


@njit(cache=True)
def _fill_gap(rank, until, rules, backwards, done, clock, level, idle, seconds, memory, orders):
    """Weight gradients into the time before `until`: those that fit well enough, or that idling costs too much."""
    fit, budget = rules
    while done[rank, W] < done[rank, I] and clock[rank] < until:
        code = backwards[rank, done[rank, W]]
        gap = until - clock[rank]
        lasts = seconds[W, code // seconds.shape[2], code % seconds.shape[2]]
        if gap < fit[rank] * lasts and idle[rank] + gap <= budget[rank]:
            break
        _run_weight(rank, backwards, done, clock, level, seconds, memory, orders)
    idle[rank] += max(until - clock[rank], 0.0)


@njit(cache=True)
def _oblige(awake, obliged, done, backwards, needs, elsewhere, arrival, microbatches):
    """Wake those ranks that wait for a forward while an input gradient is ready; how many."""
    depth = 0
    for rank in range(len(obliged)):
        if not obliged[rank] and done[rank, I] < backwards.shape[1]:
            code = backwards[rank, done[rank, I]]
            _, missing = _arrival(needs, elsewhere, arrival, I, code // microbatches, code % microbatches)
            if missing == NONE:
                obliged[rank] = True
                awake[depth] = rank
                depth += 1
    return depth
