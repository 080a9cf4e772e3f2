"""How a span looks: hue by op, shade by chunk, and whether it shares its time; the same in terminal and picture."""

from __future__ import annotations

import numpy as np

from pipeswift.trace import Trace

#: Hue of F, I, W, B.
HUES = ("#3d7ab8", "#e8a33d", "#4f9d69", "#d9703c")
IDLE = "#f1f3f5"
#: All-to-alls beside passes, alone, and reductions of gradients.
HIDDEN, EXPOSED, REDUCTION = "#8c959f", "#cf222e", "#8250df"

_LIGHTEST = 0.62  # how far the palest chunk goes towards white


def chunk_of(trace: Trace) -> np.ndarray:
    """For each span, which of its rank's stages it belongs to: 0 for the lowest stage number; int, shape (spans,)."""
    num_stages = int(trace.stage.max(initial=0)) + 1
    places, of_span = np.unique(trace.rank.astype(np.int64) * num_stages + trace.stage, return_inverse=True)
    ranks = places // num_stages
    return (np.arange(len(places)) - np.searchsorted(ranks, ranks))[of_span]


def shares_time(trace: Trace) -> np.ndarray:
    """For each span, whether an earlier one of its rank and lane has not ended when it starts; bool, shape (spans,).

    So the second part of an Overlap that is given a time of its own.
    """
    shared = np.zeros(len(trace), dtype=np.bool_)
    place = trace.rank.astype(np.int64) * (int(trace.lane.max(initial=0)) + 1) + trace.lane
    arranged = np.argsort(place, kind="stable")
    for mine in np.split(arranged, np.flatnonzero(np.diff(place[arranged])) + 1):
        shared[mine[1:]] = trace.start[mine[1:]] < np.maximum.accumulate(trace.end[mine])[:-1]
    return shared


def shade(hue: str, chunk: int, chunks: int) -> str:
    """`hue` ("#rrggbb") mixed with white: pure for chunk 0, palest for the last of `chunks`."""
    white = _LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _rgb(hue))


def ink(background: str) -> str:
    """Black or white, whichever reads better on `background`."""
    red, green, blue = _rgb(background)
    return "#1f2328" if 0.299 * red + 0.587 * green + 0.114 * blue > 145 else "#ffffff"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
