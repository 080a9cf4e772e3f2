"""What this rank is doing: plain attributes that its own thread writes and the watchdog's thread reads.

The executor adds one entry to a list and one to a number per action; every word is made by the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from pipeswift.ir import Action, Op, Product, Schedule, needs, parts
from pipeswift.policy import LEADER, Agreed, Ready
from pipeswift.program import Work
from pipeswift.runtime.groups import PeerLost

BUSY = "busy: "
_OPS = {Op.F: "F", Op.I: "I", Op.W: "W", Op.B: "B"}
_PRODUCTS = {Product.OUTPUT: "output", Product.GRADIENT: "gradient", Product.WEIGHT_GRADIENT: "weight gradient"}


class Run:
    """One run of a schedule on one rank. started: its actions so far, of which the first `ended` are done."""

    __slots__ = ("ended", "rank", "ready", "schedule", "started")

    def __init__(self, schedule: Schedule, rank: int, ready: Ready):
        self.schedule, self.rank, self.ready = schedule, rank, ready
        self.started: list[Action] = []
        self.ended = 0


class Progress:
    """Where a rank is. `call` counts the calls into the pipeline; ranks in one call have the same number.

    place: which of all ranks a rank of this pipeline is; they differ where the pipeline has replicas. sharers: which of
    all ranks share out experts with this one, itself included.
    """

    def __init__(self, place: Callable[[int], int] = lambda rank: rank, sharers: Sequence[int] = ()) -> None:
        self.place, self.sharers = place, sharers
        self.call = 0
        self.phase = ""  # empty: in the caller's own program
        self.joins = ""  # the sum over ranks, or the like, that it is in
        self.copies: tuple[str, tuple[int, ...]] | None = None  # the same with some ranks only: what, and which
        self.run: Run | None = None
        self.moves = 0  # of a call that takes long without running actions
        self.exchange: Callable[[], Work | None] = lambda: None  # the all-to-all that the host waits for
        self.last: Action | None = None  # of earlier runs
        self.error = ""  # where its last call failed, and how
        self.lost = False  # whether the transport broke in this call
        self.alert: Callable[[], None] = lambda: None  # tells the other ranks now
        self.await_verdict: Callable[[], None] = lambda: None  # returns when no rank is found to be at fault

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Around a call that all ranks make. An error that leaves it is told to the others."""
        self._enter(phase)
        try:
            yield
        except BaseException as error:
            if isinstance(error, PeerLost):
                self.lost = True
                self.await_verdict()
            self.fail(error)
            raise
        finally:
            self.last = _last(self)
            self.phase, self.run, self.lost = "", None, False

    @contextmanager
    def joining(self, what: str) -> Iterator[None]:
        """Around the part of a call in which every rank waits for every other."""
        self.joins = what
        try:
            yield
        finally:
            self.joins = ""

    @contextmanager
    def joining_copies(self, what: str, ranks: Iterable[int]) -> Iterator[None]:
        """Around the part of a call in which this rank waits for those other `ranks` of the pipeline."""
        self.copies = what, tuple(map(self.place, ranks))
        try:
            yield
        finally:
            self.copies = None

    def move(self) -> None:
        self.moves += 1

    def fail(self, error: BaseException) -> None:
        """Tells the others of an error that this rank's program may not survive."""
        doing = now_doing(self)[0].removeprefix(f"{BUSY}{self.phase}").removeprefix(BUSY)
        where = ", ".join(filter(None, (self.phase, doing)))
        self.error = f"{where}: {type(error).__name__}: {error}"
        self.alert()

    def position(self) -> tuple[object, ...]:
        """Equal at two moments when the rank has not moved between them."""
        run = self.run
        started, ended = (run and len(run.started)), (run and run.ended)
        return self.call, self.phase, self.joins, self.copies, started, ended, self.moves, self.exchange()

    def _enter(self, phase: str) -> None:
        recovers = bool(self.error)
        self.error = ""
        self.call += 1
        self.phase = phase
        if recovers:
            self.alert()


def last_done(progress: Progress) -> str:
    action = _last(progress)
    return "" if action is None else name(action)


def now_doing(progress: Progress) -> tuple[str, tuple[int, ...]]:
    """(what it does or waits for, the ranks that it waits for; none when it is busy or waits for all)."""
    if progress.lost:
        return "lost the connection to a rank", ()
    if progress.joins:
        return f"waits for all ranks: {progress.joins}", ()
    if copies := progress.copies:
        return f"waits: {copies[0]}", copies[1]
    run = progress.run
    if run is None:
        return (f"{BUSY}{progress.phase}" if progress.phase else "its own program"), ()
    started, ended = list(run.started), run.ended
    if len(started) > ended:
        if (work := progress.exchange()) is not None:
            return _exchanging(work, progress.sharers), tuple(progress.sharers)
        return f"{BUSY}{name(started[-1])}", ()
    return _awaited(run, set(started), progress)


def _exchanging(work: Work, sharers: Sequence[int]) -> str:
    """The same words on every rank that waits for this all-to-all."""
    piece = f", chunk {work.chunk} of {work.chunks}" if work.chunks > 1 else ""
    which = f"the all-to-all {work.part.name.lower()} (layer with experts {work.segment}{piece})"
    return f"waits: {name(work.action)} needs {which} with ranks {', '.join(map(str, sharers))}"


def name(action: Action) -> str:
    return f"{_OPS[action.op]} of stage {action.stage}, micro-batch {action.microbatch}"


def _awaited(run: Run, started: set[Action], progress: Progress) -> tuple[str, tuple[int, ...]]:
    """What ranks have agreed on, or the first entry of the rank's order that has not started; and what it lacks."""
    schedule, ready = run.schedule, run.ready
    agreed = ready.promised if isinstance(ready, Agreed) else None
    entry = agreed or next((entry for entry in schedule.orders[run.rank] if not started.issuperset(parts(entry))), None)
    if entry is None:
        return "done with its actions", ()
    for action in parts(entry):
        for product, stage in needs(action, schedule.num_stages):
            if not ready.has(product, stage, action.microbatch):
                holder = progress.place(schedule.rank_of(stage, action.microbatch))
                return f"waits: {name(action)} needs {_item(product, stage)} from rank {holder}", (holder,)
    if isinstance(ready, Agreed) and not agreed and (found := _unsaid(run, ready, parts(entry)[0], progress.sharers)):
        return found
    return f"about to start {name(parts(entry)[0])}", ()


def _unsaid(run: Run, ready: Agreed, action: Action, sharers: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
    """Whose word is missing for an action that this rank itself could run."""
    if not ready.leads:
        leader, last = sharers[LEADER], run.started[-1:]
        return f"waits for rank {leader} to say what comes {'after ' + name(last[0]) if last else 'first'}", (leader,)
    for product, stage in needs(action, run.schedule.num_stages):
        if (member := ready.unsure_of(product, stage, action.microbatch)) is not None:
            told = f"that rank {sharers[member]} says it has {_item(product, stage)}"
            return f"waits: {name(action)} needs {told}", (sharers[member],)
    return None


def _item(product: Product, stage: int) -> str:
    return f"the {_PRODUCTS[product]} of stage {stage}"


def _last(progress: Progress) -> Action | None:
    run = progress.run
    return run.started[run.ended - 1] if run is not None and run.ended else progress.last
