"""The published schedules, each a pure function; importing a module puts its schedule on the list."""

# isort: off
# The order of these imports is the order of the list.
from pipeswift.schedules.naive import naive
from pipeswift.schedules.gpipe import gpipe
from pipeswift.schedules.one_f_one_b import one_f_one_b
from pipeswift.schedules.interleaved import interleaved

# isort: on
from pipeswift.schedules.registry import Entry, Idle, Peak, Rule, ScheduleError, Times, build, entries, entry, schedule

__all__ = [
    "Entry",
    "Idle",
    "Peak",
    "Rule",
    "ScheduleError",
    "Times",
    "build",
    "entries",
    "entry",
    "gpipe",
    "interleaved",
    "naive",
    "one_f_one_b",
    "schedule",
]
