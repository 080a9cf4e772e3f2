"""The Gantt picture: a bar per pass, a row per rank; several timelines rank by rank on one time axis.

Passes that share their time, woven into each other, share the height of the row. All-to-alls and reductions are a
strip at its foot, in colours that say whether passes hide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pipeswift.ir import Op
from pipeswift.report.palette import EXPOSED, HIDDEN, HUES, IDLE, REDUCTION, chunk_of, ink, shade, shares_time
from pipeswift.report.usage import activity
from pipeswift.trace import ALL_TO_ALL, COMPUTE, QUEUE_DEPTH, Trace, bubble_rate, makespan, memory_curve

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "pipeswift",  # the same picture is the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#8c959f",
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "text.color": "#1f2328",
    "axes.labelcolor": "#57606a",
}
_METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_GREY = "#6e7781"
_QUEUE = "#1f2328"
_STRIP = 0.72  # where in a row the strip of all-to-alls and reductions begins, if there are any
_LINE = 0.125  # inches from line to line of the notes
_HEADED = 4  # of many traces, how many have their figures in the headline
_NOTES: dict[str, Any] = {"family": "monospace", "size": 7, "linespacing": 1.15, "color": "#57606a"}
_LEGEND = {
    "frameon": False,
    "borderaxespad": 0,
    "handlelength": 1.2,
    "handleheight": 0.9,
    "columnspacing": 1.1,
    "handletextpad": 0.4,
}


@dataclass(frozen=True)
class _Layout:
    """Sizes in inches."""

    row: float
    left: float
    width: float = 11.0
    right: float = 0.25
    top: float = 0.62
    bottom: float = 0.42
    memory: float = 0.0  # height of the memory curves, 0 for none
    notes: float = 0.0  # and of the notes

    @property
    def bars_width(self) -> float:
        return self.width - self.left - self.right


def save(
    traces: Sequence[Trace],
    file: str | Path | IO,
    *,
    format: str,
    memory: np.ndarray | None = None,
    title: str = "",
    notes: str = "",
) -> None:
    """Write the picture of `traces` as "svg" or "png"; the same input gives the same bytes.

    Parameters as for `figure`. Raises OSError when `file` cannot be written, EmptyTrace when a trace has no span.
    """
    with matplotlib.rc_context(_STYLE):
        figure(traces, memory=memory, title=title, notes=notes).savefig(
            file, format=format, dpi=160, metadata=_METADATA[format]
        )


def figure(traces: Sequence[Trace], *, memory: np.ndarray | None = None, title: str = "", notes: str = "") -> Figure:
    """The lanes of `traces`, each from its own first start, with their bubble rates.

    memory: increments of shape (4, stages) as in `Costs.memory`; adds the live activations of every rank below.
    title: by default the first trace's name. notes: lines of text below, in letters of one width.
    Raises EmptyTrace when a trace has no span.
    """
    ranks = max(trace.num_ranks for trace in traces)
    rows = ranks * len(traces)
    single = len(traces) == 1
    layout = _Layout(
        row=min(0.27, 11 / rows),
        left=0.75 if single else 1.35,
        memory=1.1 if memory is not None else 0.0,
        notes=_LINE * (len(notes.splitlines()) + 1) if notes else 0.0,
    )
    step = 1.0 if single else len(traces) + 0.35  # from rank to rank, in rows
    tops = np.arange(ranks) * step
    total = max(makespan(trace) for trace in traces)
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if total >= scale), _UNITS[-1])
    chunks = 1 + max(int(chunk_of(trace).max()) for trace in traces)

    picture, axes, curves = _panels(layout, rows_high=tops[-1] + len(traces))
    axes.set_xlim(0, total / scale)
    for index, trace in enumerate(traces):
        _bars(axes, trace, tops + index, scale, chunks, layout)
        _strips(axes, trace, tops + index, scale)
        _queues(axes, trace, tops + index, scale)
    _rank_names(axes, traces, tops, layout)
    _headline(picture, traces, title or traces[0].name, chunks, layout)
    if memory is not None:
        _memory(curves, traces, memory, scale)
    curves.set_xlabel(f"time, {unit}", loc="right", labelpad=1)
    if notes:
        fixed = notes.replace(" ", "\N{NO-BREAK SPACE}")  # SVG makes one space of many
        picture.text(layout.left / layout.width, 0.1 / picture.get_figheight(), fixed, va="bottom", **_NOTES)
    return picture


def _panels(layout: _Layout, rows_high: float) -> tuple[Figure, Axes, Axes]:
    """(figure, axes of the bars, lowest axes): the lowest are those of the memory curves, if any."""
    bars = layout.row * rows_high
    foot = layout.bottom + layout.notes
    below = foot + (layout.memory + 0.32 if layout.memory else 0.0)
    height = layout.top + bars + below
    picture = Figure(figsize=(layout.width, height))
    left, width = layout.left / layout.width, layout.bars_width / layout.width
    axes = picture.add_axes((left, below / height, width, bars / height))
    axes.set_ylim(rows_high, 0)
    if not layout.memory:
        return picture, axes, axes
    axes.tick_params(labelbottom=False)
    return picture, axes, picture.add_axes((left, foot / height, width, layout.memory / height), sharex=axes)


def _bars(axes: Axes, trace: Trace, tops: np.ndarray, scale: float, chunks: int, layout: _Layout) -> None:
    """The bars of one trace; tops[rank] is the upper edge of that rank's row."""
    origin = trace.start.min()
    foot = _STRIP - 0.04 if (trace.lane == ALL_TO_ALL).any() else 0.94
    trace = trace.only(trace.lane == COMPUTE)
    chunk = chunk_of(trace)
    start, end, top = (trace.start - origin) / scale, (trace.end - origin) / scale, tops[trace.rank]
    points_per_unit = 72 * layout.bars_width / axes.get_xlim()[1]
    width = (end - start) * points_per_unit
    for y in tops[: trace.num_ranks]:
        axes.axhspan(y + 0.06, y + 0.94, color=IDLE, linewidth=0, zorder=0)
    upper, lower = _heights(trace, top, foot)
    corners = np.stack([[start, upper], [end, upper], [end, lower], [start, lower]])
    corners = np.moveaxis(corners, 2, 0)
    shades = [[shade(hue, index, chunks) for index in range(chunks)] for hue in HUES]
    colours = [shades[op][index] for op, index in zip(trace.op.tolist(), chunk.tolist(), strict=True)]
    edge = 0.6 if np.median(width) > 4 else 0.0
    axes.add_collection(PolyCollection(list(corners), facecolors=colours, edgecolors="white", linewidths=edge))

    # What fits into a bar of the row's height is set a little smaller in one of half of it.
    size = np.minimum(8.0, 72 * layout.row * np.where(lower - upper > 0.5, 0.55, 0.4))
    label = trace.microbatch.astype(str)
    for i in np.flatnonzero((width > np.char.str_len(label) * 0.62 * size + 2.5) & (size >= 4)):
        x, y = (start[i] + end[i]) / 2, (upper[i] + lower[i]) / 2 + 0.02
        axes.text(x, y, label[i], size=size[i], color=ink(colours[i]), ha="center", va="center_baseline")


def _heights(trace: Trace, top: np.ndarray, foot: float) -> tuple[np.ndarray, np.ndarray]:
    """(upper, lower edge) of each span's bar: the row down to its foot, or, of spans that share their time, a half of
    that each."""
    second = shares_time(trace)
    first = np.zeros_like(second)
    for mine in (np.flatnonzero(trace.rank == rank) for rank in np.unique(trace.rank[second])):
        first[mine[:-1]] = ~second[mine[:-1]] & second[mine[1:]]
    middle = (0.06 + foot) / 2
    return top + np.where(second, middle, 0.06), top + np.where(first, middle, foot)


def _strips(axes: Axes, trace: Trace, tops: np.ndarray, scale: float) -> None:
    """At the foot of each row: where all-to-alls are under way beside passes, where alone, and where reductions are."""
    if not (trace.lane == ALL_TO_ALL).any():
        return
    for spans, top in zip(trace.by_rank(), tops.tolist(), strict=False):
        moments, compute, exchange, reduction = activity(spans)
        moments, lengths = (moments - trace.start.min()) / scale, np.diff(moments) / scale
        for colour, when in (
            (HIDDEN, exchange & compute),
            (EXPOSED, exchange & ~compute),
            (REDUCTION, reduction & ~exchange),
        ):
            pieces = list(zip(moments[:-1][when].tolist(), lengths[when].tolist(), strict=True))
            axes.broken_barh(pieces, (top + _STRIP, 0.94 - _STRIP), facecolors=colour, linewidth=0)


def _queues(axes: Axes, trace: Trace, tops: np.ndarray, scale: float) -> None:
    """Over the bars, how much work was waiting on each rank: from nothing at the foot of its row to the most of any."""
    queues = [counter for counter in trace.counters if counter.name == QUEUE_DEPTH]
    most = max((int(counter.value.max(initial=0)) for counter in queues), default=0)
    for counter in queues if most else ():
        time = (counter.time - trace.start.min()) / scale
        axes.step(
            time, tops[counter.rank] + 0.94 - 0.88 * counter.value / most, where="post", color=_QUEUE, linewidth=0.7
        )


def _rank_names(axes: Axes, traces: Sequence[Trace], tops: np.ndarray, layout: _Layout) -> None:
    """Left of the rows: which rank, and with several traces, which trace."""
    axes.tick_params(left=False)
    every = max(1, round(0.14 / layout.row))
    names = [(f"rank {rank}", top + len(traces) / 2) for rank, top in enumerate(tops.tolist())][::every]
    if len(traces) == 1 or every > 1:
        axes.set_yticks([y for _, y in names], [name for name, _ in names])
        return
    rows = [(trace.name, top + index + 0.5) for top in tops.tolist() for index, trace in enumerate(traces)]
    axes.set_yticks([y for _, y in rows], [name for name, _ in rows], size=7)
    for name, y in names:
        x = -(layout.left - 0.15) / layout.bars_width
        axes.text(x, y, name, transform=axes.get_yaxis_transform(), weight="bold", va="center")


def _headline(picture: Figure, traces: Sequence[Trace], title: str, chunks: int, layout: _Layout) -> None:
    """Title and figures on the left, legend on the right."""
    left, height = layout.left / layout.width, picture.get_figheight()
    picture.text(left, 1 - 0.12 / height, title, size=11, weight="bold", va="top")
    figures = [_figures(trace) for trace in traces]
    if len(traces) > 1:
        figures = [f"{trace.name}: {text}" for trace, text in zip(traces, figures, strict=True)]
    if len(traces) > 2:  # as many as there is room for, without the second rate
        figures = [text.partition(" by span")[0] for text in figures[:_HEADED]] + ["..."] * (len(traces) > _HEADED)
    picture.text(left, 1 - 0.36 / height, "     ".join(figures), color=_GREY, va="top")
    used = np.unique(np.concatenate([trace.op[trace.lane == COMPUTE] for trace in traces])).tolist()
    patches: list[Patch | Line2D] = [Patch(color=HUES[op], label="FIWB"[op]) for op in used]
    if chunks > 1:
        patches += [Patch(color=shade(_GREY, chunk, chunks), label=f"chunk {chunk}") for chunk in range(chunks)]
    patches += [Patch(color=colour, label=name) for name, colour in _kinds(traces).items()]
    if any(counter.name == QUEUE_DEPTH for trace in traces for counter in trace.counters):
        patches.append(Line2D([], [], color=_QUEUE, linewidth=0.7, label=QUEUE_DEPTH))
    corner = (1 - layout.right / layout.width, 1 - 0.08 / height)
    picture.legend(handles=patches, **_LEGEND, loc="upper right", bbox_to_anchor=corner, ncols=len(patches))


def _kinds(traces: Sequence[Trace]) -> dict[str, str]:
    """The colours of the strips, for what there is."""
    ops = np.concatenate([trace.op[trace.lane == ALL_TO_ALL] for trace in traces])
    exchange = {"all-to-all, hidden": HIDDEN, "exposed": EXPOSED} if (ops != Op.W).any() else {}
    return exchange | ({"reduction": REDUCTION} if (ops == Op.W).any() else {})


def _figures(trace: Trace) -> str:
    by_span, by_makespan = bubble_rate(trace, by="span"), bubble_rate(trace, by="makespan")
    return f"{makespan(trace):.4g} s, bubble {by_span:.1%} by span, {by_makespan:.1%} by makespan"


def _memory(axes: Axes, traces: Sequence[Trace], memory: np.ndarray, scale: float) -> None:
    """Live activations over time: a line per rank, the first trace solid, the others dashed."""
    ranks = max(trace.num_ranks for trace in traces)
    colours = [matplotlib.colormaps["viridis"](0.9 * rank / max(ranks - 1, 1)) for rank in range(ranks)]
    shown = range(ranks) if ranks <= 8 else (0, ranks - 1)
    keys = [Line2D([], [], color=colours[rank], label=f"rank {rank}") for rank in shown]
    for index, trace in enumerate(traces):
        line = "--" if index else "-"
        for rank, spans in enumerate(trace.by_rank()):
            times, levels = memory_curve(spans, memory, rank)
            seconds = (times - trace.start.min()) / scale
            axes.step(seconds, levels, line, where="post", color=colours[rank], linewidth=1)
        if len(traces) > 1:
            keys.append(Line2D([], [], color=_GREY, linestyle=line, label=trace.name))
    axes.set_ylim(0)
    axes.set_ylabel("live activations")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(axis="y", color="#d0d7de", linewidth=0.5)
    axes.legend(handles=keys, **_LEGEND, loc="lower right", bbox_to_anchor=(1, 1.02), ncols=len(keys), fontsize=7)
