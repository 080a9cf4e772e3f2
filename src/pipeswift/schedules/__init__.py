"""The published schedules, each a pure function; importing a module puts its schedule on the list."""

# isort: off
# The order of these imports is the order of the list.
from pipeswift.schedules.naive import naive
from pipeswift.schedules.gpipe import gpipe
from pipeswift.schedules.one_f_one_b import one_f_one_b
from pipeswift.schedules.interleaved import interleaved
from pipeswift.schedules.zb_h1 import zb_h1
from pipeswift.schedules.zb_h2 import zb_h2
from pipeswift.schedules.zb_v import zb_v
from pipeswift.schedules.v_half import v_half
from pipeswift.schedules.v_min import v_min
from pipeswift.schedules.pipedream import pipedream
from pipeswift.schedules.dualpipe import dualpipe
from pipeswift.schedules.dualpipe_v import dualpipe_v
from pipeswift.schedules.overlapped import interleaved_overlap, one_f_one_b_overlap

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
    "dualpipe",
    "dualpipe_v",
    "entries",
    "entry",
    "gpipe",
    "interleaved",
    "interleaved_overlap",
    "naive",
    "one_f_one_b",
    "one_f_one_b_overlap",
    "pipedream",
    "schedule",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
