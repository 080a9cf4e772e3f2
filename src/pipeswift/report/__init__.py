"""Timelines for people: as text, as a table, as a picture, as a file for a trace viewer.

`gantt` needs matplotlib and is imported by whoever draws a picture, not from here.
"""

from pipeswift.report.limit import Excess, first_excess
from pipeswift.report.summary import Summary, summarize
from pipeswift.report.terminal import draw

__all__ = ["Excess", "Summary", "draw", "first_excess", "summarize"]
