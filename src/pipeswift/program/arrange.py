"""List scheduling: the order of a program's works, or of two programs' together, that their costs suggest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeswift.program.steps import Kind, Lane, Program, Work, issue, kind_of
from pipeswift.program.timeline import Seconds, simulate, tails

_PATIENCE = (0, 1 / 16, 1 / 4)  # in units of the longest work


def merge(first: Program, second: Program, seconds: Seconds) -> Program:
    """Both programs woven into one: each one's communication runs while the other computes.

    A pure function of programs and costs, so ranks that agree on these agree on the order of collectives. Every work
    keeps what it comes after. Never slower, as simulated, than one program after the other.
    """
    both = {**first.after, **second.after}
    return arrange(issue((*first.works, *second.works), both), seconds)


def arrange(program: Program, seconds: Seconds) -> Program:
    """The same works in the order that `seconds` suggest: the fastest, as simulated, of a few; a tie goes to the first.

    As it is; and by list scheduling, a launch before all else, then the work with most to come of those that can start
    within some patience. Without patience a host may start a long work a moment before a more urgent one could.
    """
    longest = max(map(seconds, program.works), default=0.0)
    orders = (_list(program, seconds, patience * longest) for patience in _PATIENCE)
    candidates = (program, *(issue(order, program.after) for order in orders))
    return min(candidates, key=lambda candidate: _rounded(simulate(candidate, seconds).elapsed))


class _Option(NamedTuple):
    """A work that may be next."""

    begins: float  # when the host could take its step
    frees: float  # when the host could go on
    to_come: float  # seconds from its start to the end of all that comes after it
    work: Work


def _choose(options: Sequence[_Option], patience: float) -> _Option:
    soon = min(option.begins for option in options) + patience
    return min(
        (option for option in options if option.begins <= soon),
        key=lambda option: (option.frees > option.begins, -option.to_come, option.begins),
    )


def _list(program: Program, seconds: Seconds, patience: float) -> Iterator[Work]:
    """The works as `_choose` picks them, one after the other, on the clock of `simulate`."""
    tail = tails(program, seconds)
    host = 0.0
    free = dict.fromkeys(Lane, 0.0)
    ends: dict[Work, float] = {}
    left = list(program.works)
    needs = {work: set(program.after[work]) for work in left}

    def end_of(work: Work, begins: float) -> float:
        return max(begins, free[work.lane]) + seconds(work)

    def option(work: Work) -> _Option:
        begins = max([host, *(ends[before] for before in program.after[work])])
        blocks = kind_of(work) in (Kind.COMPUTE, Kind.TAKE)
        return _Option(begins, end_of(work, begins) if blocks else begins, seconds(work) + tail[work], work)

    while left:
        ready = [option(work) for work in left if ends.keys() >= needs[work]]
        begins, host, _, work = _choose(ready, patience)
        free[work.lane] = ends[work] = end_of(work, begins)
        left.remove(work)
        yield work


def _rounded(elapsed: float) -> float:
    """Sums in another order differ in their last bits, and no choice may hang on those."""
    return float(f"{elapsed:.9g}")
