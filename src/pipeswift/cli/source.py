"""Where a command gets its schedule from: a name on the list, or a file."""

from __future__ import annotations

from pathlib import Path

from pipeswift import codec, schedules
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.verify import check

MOST_PASSES = 2**24  # forwards of one step: 1,024 ranks, 4 chunks, 4,096 micro-batches


def is_file(source: str) -> bool:
    """Whether `source` is meant as a file: it looks like one, or is there."""
    return source.lower().endswith((".csv", ".json")) or Path(source).is_file()


def require_size(source: str, pp: int | None, microbatches: int | None, chunks: int | None) -> None:
    """Raise PipeSwiftError unless `source` is a file, or a name with a size that can be built."""
    if is_file(source):
        return
    schedules.entry(source)
    for setting, value in (("--pp", pp), ("--microbatches", microbatches)):
        if value is None:
            raise PipeSwiftError(f"{source} is a schedule of any size, and {setting} is missing. Add {setting} 4, say.")
    passes = (pp or 1) * (microbatches or 1) * (chunks or 1)
    if passes > MOST_PASSES:
        raise PipeSwiftError(
            f"--pp {pp} times --microbatches {microbatches} times --chunks {chunks or 1} makes {passes:,} forward "
            f"passes, and the most is {MOST_PASSES:,}. Use fewer: the pattern repeats after a few --pp micro-batches."
        )


def get(source: str, pp: int | None, microbatches: int | None, chunks: int | None) -> Schedule:
    """The schedule called `source`, built to size, or the one in the file `source`, whose size has to agree.

    Raises PipeSwiftError when there is none, when the numbers do not suit it, or when the file's cannot run.
    """
    require_size(source, pp, microbatches, chunks)
    if not is_file(source):
        return schedules.build(source, pp or 1, microbatches or 1, chunks)
    schedule = codec.load(source)
    for setting, given, found in (
        ("--pp", pp, schedule.num_ranks),
        ("--microbatches", microbatches, schedule.num_microbatches),
        ("--chunks", chunks, schedule.chunks),
    ):
        if given is not None and given != found:
            raise PipeSwiftError(
                f"{source} has {setting} {found}: got {setting} {given}. Leave it out, or give {found}."
            )
    check(schedule)
    return schedule
