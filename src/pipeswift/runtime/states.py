"""What the watchdog knows of all ranks: their states, whether one is at fault, and the table that says so. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeswift.runtime.process import Condition
from pipeswift.runtime.progress import BUSY

GRACE = 1.0  # seconds that a rank whose call failed has to leave or to try again, before others end on its account


class State(NamedTuple):
    """A rank's account of itself. still: seconds since it moved; waits: ranks whose products it needs, or
    all that take part in the all-to-all, or the sum of a stage's gradients, that it is in.
    """

    call: int
    phase: str
    joins: str
    still: float
    last: str
    doing: str
    waits: Sequence[int]
    error: str = ""
    lost: bool = False
    left: bool = False

    @property
    def active(self) -> bool:
        """Whether it is in a call that needs other ranks."""
        return not self.left and not self.error and self.phase not in ("", START_UP)


START_UP = "start-up"  # a phase in which a rank may take as long as it likes, such as building a large stage


@dataclass(frozen=True)
class Sighting:
    """One rank as another sees it. state: its last word, None before the first; age: how many seconds ago that was."""

    process: str
    condition: Condition
    state: State | None
    age: float

    @property
    def left(self) -> bool:
        return self.state is not None and self.state.left

    @property
    def still(self) -> float:
        return self.age if self.state is None else self.state.still + self.age


class Fault(NamedTuple):
    culprits: tuple[int, ...]
    text: str


def find_fault(ranks: Sequence[Sighting], patience: float) -> Fault | None:
    """Why the run cannot go on, or None.

    A rank whose process is gone, which gives no sign of life for `patience` seconds, or whose call failed while others
    are in the same one; else, when some rank is in a step and none has moved for `patience` seconds, the rank at which
    the chain of waits ends.
    """
    found = {
        rank: text
        for rank, seen in enumerate(ranks)
        if (text := _gone(rank, seen) or _silent(rank, seen, patience) or _failed(rank, seen, ranks))
    }
    if found:
        return Fault(tuple(found), "; ".join(found.values()))
    return _standstill(ranks, patience)


def table(ranks: Sequence[Sighting], fault: Fault, replicas: int = 1) -> str:
    """One line per rank; a culprit is marked. With replicas, it says which rank of which pipeline each is."""
    rows = [("rank", "process", "in", "still for", "last done", "now")]
    for rank, seen in enumerate(ranks):
        state, mark = seen.state, " !" if rank in fault.culprits else ""
        phase, last = ("?", "?") if state is None else (state.phase or "-", state.last or "-")
        place = "" if replicas == 1 else " (pp {}, dp {})".format(*divmod(rank, replicas))
        rows.append((f"{rank}{place}{mark}", seen.process, phase, f"{seen.still:.1f} s", last, _now(seen)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join(map(str.ljust, row, (*widths, 0))).rstrip() for row in rows)


def _now(seen: Sighting) -> str:
    if seen.condition in (Condition.GONE, Condition.STOPPED) and not seen.left:
        before = f"; before: {_told(seen.state)}" if seen.state else ""
        return f"{seen.condition.value}{before}"
    return "no word yet" if seen.state is None else _told(seen.state)


def _told(state: State) -> str:
    if state.error:
        return f"failed in {state.error.splitlines()[0]}"
    return "left the pipeline" if state.left else state.doing


def _gone(rank: int, seen: Sighting) -> str:
    if seen.condition is not Condition.GONE or seen.left:
        return ""
    if seen.state is not None and seen.state.error:
        return f"rank {rank} failed in {seen.state.error}"
    return f"rank {rank} is gone: its process {seen.process} has ended"


def _silent(rank: int, seen: Sighting, patience: float) -> str:
    if seen.left or seen.age < patience:
        return ""
    if seen.state is None and seen.condition is Condition.UNKNOWN:
        return ""  # it may be that the network between the hosts lets no heartbeat through
    how = "is stopped" if seen.condition is Condition.STOPPED else "gives no sign of life"
    return f"rank {rank} {how}: nothing heard of its process {seen.process} for {seen.age:.1f} s"


def _failed(rank: int, seen: Sighting, ranks: Sequence[Sighting]) -> str:
    state = seen.state
    if state is None or not state.error or seen.still < GRACE:
        return ""
    needed = any(
        other.state is not None and other.state.phase and not other.state.error and other.state.call == state.call
        for other in ranks
    )
    return f"rank {rank} failed in {state.error}" if needed else ""


def _standstill(ranks: Sequence[Sighting], patience: float) -> Fault | None:
    states = [seen.state for seen in ranks]
    if any(state is None for state in states) or not any(state.active for state in states if state):
        return None
    cut_off = any(state.lost for state in states if state) and any(seen.left for seen in ranks)
    for seen in ranks:
        if not seen.left and seen.still < (GRACE if cut_off else patience):
            return None
    known = [state for state in states if state]
    culprits, why = _parted(known) or _end_of(_chain(known), known, ranks)
    shortest = min(seen.still for seen in ranks if not seen.left)
    return Fault(culprits, f"nothing has moved for {shortest:.1f} s: {why}")


def _parted(states: Sequence[State]) -> tuple[tuple[int, ...], str] | None:
    """Ranks whose latest calls have the same number but are different ones."""
    first: dict[int, int] = {}
    for rank, state in enumerate(states):
        other = first.setdefault(state.call, rank)
        if state.active and states[other].active and state.phase != states[other].phase:
            return (
                (other, rank),
                f"rank {other} is in {states[other].phase}, but rank {rank} is in {state.phase}; "
                "every rank must make the same calls in the same order",
            )
    return None


def _chain(states: Sequence[State]) -> list[int]:
    """Ranks, each waiting for the next; when the last is there twice, they wait in a circle."""
    chain = [next(rank for rank, state in enumerate(states) if state.active)]
    while (following := _waits_for(chain[-1], states)) is not None:
        chain.append(following)
        if following in chain[:-1]:
            break
    return chain


def _waits_for(rank: int, states: Sequence[State]) -> int | None:
    state = states[rank]
    if state.waits:
        # Of several that have to come to one all-to-all, or sum, one that is not there yet.
        return next((other for other in state.waits if states[other].doing != state.doing), state.waits[0])
    if state.joins and state.active:
        behind = [
            other
            for other, theirs in enumerate(states)
            if theirs.call < state.call or (theirs.call == state.call and theirs.joins != state.joins)
        ]
        # Of those in the same call, one that itself joins something is more likely held up than holding up.
        return min(behind, key=lambda other: (states[other].call, bool(states[other].joins)), default=None)
    if state.lost:
        return next((other for other, theirs in enumerate(states) if theirs.left), None)
    return None


def _end_of(chain: Sequence[int], states: Sequence[State], ranks: Sequence[Sighting]) -> tuple[tuple[int, ...], str]:
    rank = chain[-1]
    state = states[rank]
    if rank in chain[:-1]:
        circle = chain[chain.index(rank) :]
        if len(circle) == 2:
            return (rank,), f"rank {rank} waits for itself: {state.doing.removeprefix('waits: ')}, which is yet to run"
        return tuple(circle[:-1]), "ranks " + ", which waits for ".join(map(str, circle))
    if state.left:
        return (rank,), f"rank {rank} has closed its pipeline, or its program has ended, while others need it"
    if state.error:
        return (rank,), f"rank {rank} failed in {state.error}"
    if state.joins:
        return (), f"all ranks are in the same call ({state.joins}), and it does not end"
    if not state.phase:
        where = "is in its own program, outside of the pipeline (loading data, saving?)"
    else:
        where = f"is {state.doing.replace(BUSY, 'busy in ')}"
    return (rank,), (
        f"rank {rank} {where}, for {ranks[rank].still:.1f} s; if that may take so long, "
        "pass Pipeline(..., watchdog=SECONDS) with more than it takes"
    )
