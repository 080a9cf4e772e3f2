"""A program on the clock: when its works run, and what no order of them could beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeswift.program.steps import Kind, Lane, Program, Work

Seconds = Callable[[Work], float]  # how long a work keeps its lane busy


class Span(NamedTuple):
    """A work that ran, or would; seconds on one clock."""

    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one run of a program, simulated or measured, in the order in which they ended or were simulated."""

    spans: tuple[Span, ...]

    @property
    def elapsed(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def busy(self, lane: Lane) -> float:
        """Seconds that works kept `lane` busy."""
        return sum(span.end - span.start for span in self.spans if span.work.lane is lane)

    @property
    def efficiency(self) -> float:
        """max(compute, communication) / elapsed, at most 1: what hiding has reached of what it can."""
        return max(map(self.busy, Lane)) / self.elapsed if self.elapsed else 1.0

    @property
    def hidden(self) -> float:
        """The share, between 0 and 1, of the all-to-alls' time in which the compute lane was busy; 1 without any."""
        sent = self.busy(Lane.ALL_TO_ALL)
        compute = [span for span in self.spans if span.work.lane is Lane.COMPUTE]
        covered = sum(
            max(min(one.end, other.end) - max(one.start, other.start), 0.0)
            for one in self.spans
            if one.work.lane is Lane.ALL_TO_ALL
            for other in compute
        )
        return covered / sent if sent else 1.0


def simulate(program: Program, seconds: Seconds) -> Timeline:
    """When each work runs if it takes `seconds`, on a host that starts at 0 and takes the steps in order.

    A launch costs the host nothing; the work starts when its lane has done what was launched before. A message that is
    taken is `seconds` late; one that is sent keeps its lane, and nobody here waits for it.
    """
    return together(program, [seconds], [0.0])[0]


def together(program: Program, seconds: Sequence[Seconds], starts: Sequence[float]) -> list[Timeline]:
    """The same on several ranks, each with its own seconds and start, which meet in all-to-alls.

    An all-to-all begins on a rank when its lane has come to it, and ends on all at once: as much later than the last
    beginning as the slowest of them takes.
    """
    hosts = [_Host(start) for start in starts]
    for kind, work in program.steps:
        if work.lane is Lane.ALL_TO_ALL and kind is Kind.LAUNCH:
            begins = [host.begins(work) for host in hosts]
            end = max(begins) + max(each(work) for each in seconds)
            for host, start in zip(hosts, begins, strict=True):
                host.spend(work, start, end)
            continue
        for host, each in zip(hosts, seconds, strict=True):
            if kind is Kind.WAIT:
                host.now = max(host.now, host.ends[work])
                continue
            start = host.begins(work)
            host.spend(work, start, start + each(work))
            if kind in (Kind.COMPUTE, Kind.TAKE):
                host.now = host.ends[work]
    return [Timeline(tuple(host.spans)) for host in hosts]


class _Host:
    """One rank that takes steps. ends: of its works."""

    def __init__(self, now: float):
        self.now = now
        self.ends: dict[Work, float] = {}
        self.spans: list[Span] = []
        self._free = dict.fromkeys(Lane, now)

    def begins(self, work: Work) -> float:
        return max(self.now, self._free[work.lane])

    def spend(self, work: Work, start: float, end: float) -> None:
        self._free[work.lane] = self.ends[work] = end
        self.spans.append(Span(work, start, end))


def bound(program: Program, seconds: Seconds) -> float:
    """The two-lane ideal: seconds, latencies included, that no order of the program's works can beat.

    For any set of works of one lane: the least that comes before one of them, what they take, and the least that comes
    after one. The largest over all such sets; for a layer whose compute hides everything else, it is the first
    dispatch, all compute, and the last combine.
    """
    head, tail = heads(program, seconds), tails(program, seconds)
    return max(_lane_bound(list(program.on(lane)), head, tail, seconds) for lane in Lane)


def heads(program: Program, seconds: Seconds) -> dict[Work, float]:
    """For each work, the seconds that must pass before it can start."""
    found: dict[Work, float] = {}
    for work in program.works:
        found[work] = max((found[before] + seconds(before) for before in program.after[work]), default=0.0)
    return found


def tails(program: Program, seconds: Seconds) -> dict[Work, float]:
    """For each work, the seconds that must pass after its end."""
    found = dict.fromkeys(program.works, 0.0)
    for work in reversed(program.works):
        for before in program.after[work]:
            found[before] = max(found[before], seconds(work) + found[work])
    return found


def _lane_bound(works: list[Work], head: dict[Work, float], tail: dict[Work, float], seconds: Seconds) -> float:
    """The best bound over the sets of works with heads, and with tails, of at least some value."""
    best = 0.0
    for least in {head[work] for work in works}:
        later = sorted((work for work in works if head[work] >= least), key=lambda work: -tail[work])
        total = 0.0
        for work in later:
            total += seconds(work)
            best = max(best, least + total + tail[work])
    return best
