"""The list of published schedules: what each is called, where it comes from, what it asks for and what it costs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule


class ScheduleError(PipeSwiftError):
    """A schedule was asked for that does not exist, or with numbers it cannot take."""


class Times(NamedTuple):
    """Seconds that one rank takes for each pass of one micro-batch, all its chunks together."""

    F: float
    I: float  # noqa: E741
    W: float

    @property
    def B(self) -> float:
        return self.I + self.W

    @property
    def equal(self) -> bool:
        """Whether F, I and W last equally long."""
        return self.F == self.I == self.W


class Idle(NamedTuple):
    """Seconds that a rank idles, for equal stages and free communication.

    by="makespan": every rank, between the first start and the last end of all. by="span": the rank with the longest
    time between its own first start and last end, beyond its work (the Zero Bubble papers).
    holds: for which (p, m, times) `of` is exact; `text` is its form for many micro-batches.
    """

    text: str
    of: Callable[[int, int, int, Times], float]  # (p, m, v, times)
    by: Literal["makespan", "span"] = "makespan"
    holds: Callable[[int, int, Times], bool] = lambda p, m, times: True


class Peak(NamedTuple):
    """The most activations alive on one rank, in units of one rank's share of the model for one micro-batch.

    No rank exceeds `of`, and at least one reaches it.
    """

    text: str
    of: Callable[[int, int, int, int], float]  # (p, m, v, rank)


class Rule(NamedTuple):
    """What a schedule asks of one setting, given the others."""

    setting: str  # "--microbatches" or "--pp"
    text: str  # completes "NAME needs ..."
    holds: Callable[[int, int], bool]  # (p, m)


@dataclass(frozen=True)
class Entry:
    """One schedule of the list.

    generate(p, m), or generate(p, m, v) if `any_chunks`, makes it; `chunks` is the number of chunks per rank that it
    takes, or, if `any_chunks`, the one it takes by default. flush: whether weights wait for the end of the step.
    """

    name: str
    generate: Callable[..., Schedule]
    paper: str
    bubble: Idle | None
    memory: Peak | None
    rules: tuple[Rule, ...]
    chunks: int
    any_chunks: bool
    flush: bool = True

    @property
    def summary(self) -> str:
        """The first line of the generator's docstring."""
        return (self.generate.__doc__ or "").strip().partition("\n")[0]


_entries: dict[str, Entry] = {}


def schedule(
    name: str,
    *,
    paper: str,
    bubble: Idle | None = None,
    memory: Peak | None = None,
    rules: tuple[Rule, ...] = (),
    chunks: int = 1,
    any_chunks: bool = False,
    flush: bool = True,
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Put the decorated generator on the list, under `name`; the function itself stays as it is."""

    def register(generate: Callable[..., Schedule]) -> Callable[..., Schedule]:
        _entries[name] = Entry(name, generate, paper, bubble, memory, rules, chunks, any_chunks, flush)
        return generate

    return register


def entries() -> tuple[Entry, ...]:
    """All schedules, in the order of their history."""
    return tuple(_entries.values())


def entry(name: str) -> Entry:
    """The schedule called `name`. Raises ScheduleError, naming the nearest, when there is none."""
    if name in _entries:
        return _entries[name]
    near = difflib.get_close_matches(name, _entries, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ScheduleError(f"there is no schedule {name!r}. {hint}The schedules are {_listed(_entries)}.")


def build(name: str, p: int, m: int, chunks: int | None = None) -> Schedule:
    """The schedule `name` for p ranks, m micro-batches and, where it has a choice, `chunks` stages per rank.

    Raises ScheduleError when the name is unknown or the numbers break one of its rules; the text names a way out.
    """
    found = entry(name)
    v = found.chunks if chunks is None else chunks
    for setting, value in (("--pp", p), ("--microbatches", m), ("--chunks", v)):
        if value < 1:
            raise ScheduleError(f"{setting} must be at least 1: got {setting} {value}. Use 1 or more.")
    if v != found.chunks and not found.any_chunks:
        raise ScheduleError(_wrong_chunks(found, v))
    for rule in found.rules:
        if not rule.holds(p, m):
            raise ScheduleError(_broken(found, rule, p, m))
    made = found.generate(p, m, v) if found.any_chunks else found.generate(p, m)
    return replace(made, name=name, options={"chunks": v} if v != 1 else {})


def _wrong_chunks(found: Entry, v: int) -> str:
    takes = "one chunk" if found.chunks == 1 else f"{found.chunks} chunks"
    others = _listed(other.name for other in entries() if other.any_chunks)
    return f"{found.name} takes {takes} per rank: got --chunks {v}. Use --chunks {found.chunks}, or {others}."


def _broken(found: Entry, rule: Rule, p: int, m: int) -> str:
    def holds_with(value: int) -> bool:
        return rule.holds(p, value) if rule.setting == "--microbatches" else rule.holds(value, m)

    got = f"--microbatches {m} with --pp {p}" if rule.setting == "--microbatches" else f"--pp {p}"
    value = m if rule.setting == "--microbatches" else p
    use = " or ".join(map(str, _nearest_two(holds_with, value, reach=4 * (p + m))))
    free = _listed(other.name for other in entries() if not other.rules)
    return f"{found.name} needs {rule.text}: got {got}. Use {use}, or a schedule without that rule ({free})."


def _nearest_two(holds: Callable[[int], bool], value: int, reach: int) -> list[int]:
    """The valid values on either side of `value`; two above it where none is below."""
    below = list(islice((n for n in range(value - 1, 0, -1) if holds(n)), 1))
    above = islice((n for n in range(value + 1, value + reach) if holds(n)), 2 - len(below))
    return below + list(above)


def _listed(names: Iterator[str] | dict[str, Entry]) -> str:
    return ", ".join(names)
