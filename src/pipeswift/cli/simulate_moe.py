"""`pipeswift simulate-moe`: the step programs of MoE blocks, lane by lane, in the number of chunks that suits them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import typer

from pipeswift.cli import options, output
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action, Op
from pipeswift.program import (
    LINKS,
    BlockCosts,
    Choice,
    Form,
    Lane,
    Line,
    Part,
    Program,
    Timeline,
    Work,
    arrange,
    bound,
    choose,
    chunk,
    compile_action,
    merge,
    simulate,
)
from pipeswift.report.lanes import Bar
from pipeswift.trace import LANES


class Shown(NamedTuple):
    """One program on the clock. choices: by pass, in how many chunks; two of them for two passes woven together."""

    timeline: Timeline
    ideal: float
    choices: Mapping[str, Choice]


def _seconds(flag: str, what: str):
    return typer.Option(flag, parser=options.number(float, 0, options.LONGEST), help=what, metavar="SECONDS")


def _count(flag: str, metavar: str, what: str):
    return typer.Option(flag, parser=options.number(int, 1, 4096), help=what, metavar=metavar)


def simulate_moe(
    blocks: Annotated[int, _count("--blocks", "N", "MoE blocks of the stage.")] = 1,
    experts: Annotated[float, _seconds("--experts", "The experts' F on one rank, all tokens; so I, and so W.")] = 1.0,
    start: Annotated[float, _seconds("--start", "What each chunk of the experts takes besides.")] = 0.01,
    exchange: Annotated[float | None, _seconds("--exchange", "One dispatch, or combine, of all tokens. [0.4]")] = None,
    latency: Annotated[float | None, _seconds("--latency", "What each all-to-all takes besides. [0.01]")] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", help=f"With --sent, instead of both: {', '.join(LINKS)}.", metavar="NAME"),
    ] = None,
    sent: Annotated[
        float | None,
        typer.Option(
            "--sent", parser=options.number(float, 0, 1e18), help="Bytes that leave a rank in a dispatch.", metavar="N"
        ),
    ] = None,
    attention: Annotated[float, _seconds("--attention", "Attention and router, forward; backward takes twice.")] = 0.0,
    shared: Annotated[float, _seconds("--shared", "A shared expert, forward; backward takes twice. 0: none.")] = 0.0,
    local: Annotated[
        float,
        typer.Option(
            "--local",
            parser=options.number(float, 0, 1),
            help="The share of tokens whose experts are on their own rank; they go first.",
            metavar="SHARE",
        ),
    ] = 0.0,
    experts_per_rank: Annotated[int, _count("--experts-per-rank", "N", "The most chunks that there can be.")] = 8,
    forward_chunks: Annotated[int | None, _count("--forward-chunks", "R", "Instead of the best number.")] = None,
    backward_chunks: Annotated[int | None, _count("--backward-chunks", "R", "Instead of the best number.")] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Weave one micro-batch's forward into another's backward, too.")
    ] = False,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help='Write figures and spans; "-" is standard output.')
    ] = None,
) -> None:
    """Simulate forward and backward of a stage of MoE blocks: what their all-to-alls hide behind, and what shows."""
    costs = BlockCosts(
        exchange=_exchange(exchange, latency, link, sent),
        sent=1.0 if sent is None else sent,
        experts=dict.fromkeys((Op.F, Op.I, Op.W), Line(start, experts)),
        local=local,
        others={
            (Part.ATTENTION, Op.F): attention,
            (Part.ATTENTION, Op.B): 2 * attention,
            (Part.SHARED, Op.F): shared,
            (Part.SHARED, Op.B): 2 * shared,
        },
    )
    layout = (Form.MOE_SHARED if shared else Form.MOE,) * blocks
    shown = _simulated(layout, costs, experts_per_rank, {Op.F: forward_chunks, Op.B: backward_chunks}, overlap)
    if json is None:
        _show(shown)
        return
    with output.opened(json, "--json") as file:
        _write(shown, file)


def _exchange(exchange: float | None, latency: float | None, link: str | None, sent: float | None) -> Line:
    """The line through an all-to-all's seconds; by bytes with a link, else by the share of all tokens."""
    if link is None and sent is None:
        return Line(0.01 if latency is None else latency, 0.4 if exchange is None else exchange)
    if exchange is not None or latency is not None:
        raise PipeSwiftError("--link and --sent stand for --exchange and --latency. Give the one pair or the other.")
    if link is None or sent is None:
        raise PipeSwiftError(f"--link and --sent go together. Add {'--link' if link is None else '--sent'}.")
    if link not in LINKS:
        raise PipeSwiftError(f"there is no link --link {link}. Use {', '.join(LINKS)}, or --exchange and --latency.")
    return LINKS[link].line


def _simulated(
    layout: tuple[Form, ...], costs: BlockCosts, most: int, chunks: Mapping[Op, int | None], overlap: bool
) -> dict[str, Shown]:
    programs: dict[str, Program] = {}
    choices: dict[str, Choice] = {}
    for microbatch, (name, op) in enumerate({"backward": Op.B, "forward": Op.F}.items()):
        action = Action(0, op, microbatch)
        block = compile_action(action, layout=layout[:1], takes=False, sends=False)
        try:
            choices[name] = choose(block, costs, most=most, chunks=chunks[op])
        except PipeSwiftError as error:
            raise PipeSwiftError(f"--{name}-chunks: {error}") from None
        whole = compile_action(action, layout=layout, takes=False, sends=False)
        programs[name] = chunk(whole, choices[name].chunks, local_first=costs.local > 0)
    shown = {name: _timed(arrange(programs[name], costs), costs, {name: choices[name]}) for name in reversed(programs)}
    if overlap:
        shown["overlap"] = _timed(merge(programs["forward"], programs["backward"], costs), costs, choices)
    return shown


def _timed(program: Program, costs: BlockCosts, choices: Mapping[str, Choice]) -> Shown:
    return Shown(simulate(program, costs), bound(program, costs), choices)


# What a person reads.

_LETTERS = {
    Part.ATTENTION: "A",
    Part.COUNTS: "N",
    Part.DISPATCH: "D",
    Part.EXPERTS: "E",
    Part.COMBINE: "C",
    Part.SHARED: "S",
    Part.MERGE: "M",
}
_LEGEND = "A attention, N counts, D dispatch, E experts, W their weights, C combine, S shared expert, M merge"


def _show(shown: Mapping[str, Shown]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from pipeswift.report.lanes import picture

    console = output.console()
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for title in ("", *_FIGURES):
        table.add_column(title, justify="right" if title else "left", style=None if title else "bold")
    for name, one in shown.items():
        console.print(f"{name}, {_in_chunks(one)}", style="bold")
        console.print(picture(_bars(one.timeline), console.width))
        table.add_row(name, *(cell(one) for cell in _FIGURES.values()))
    console.print(_LEGEND, style="dim")
    console.print(table)
    for name in ("forward", "backward"):
        choice = shown[name].choices[name]
        tried = ", ".join(f"{number}: {seconds:.6g}" for number, seconds in choice.seconds.items())
        console.print(f"{name}, seconds of one block by chunks: {tried}")


_FIGURES = {
    "elapsed": lambda one: f"{one.timeline.elapsed:.6g} s",
    "two-lane ideal": lambda one: f"{one.ideal:.6g} s",
    "efficiency": lambda one: f"{one.timeline.efficiency:.3f}",
    "communication hidden": lambda one: f"{100 * one.timeline.hidden:.1f} %",
}


def _in_chunks(one: Shown) -> str:
    numbers = [choice.chunks for choice in one.choices.values()]
    return " and ".join(f"{number} chunk{'s' * (number > 1)}" for number in numbers)


def _bars(timeline: Timeline) -> dict[str, list[Bar]]:
    lanes = (Lane.COMPUTE, Lane.ALL_TO_ALL)
    bars = {LANES[lane]: [] for lane in lanes}
    for work, start, end in sorted(timeline.spans, key=lambda span: span.start):
        bars[LANES[work.lane]].append(Bar(start, end, _label(work), work.action.op, work.chunk % 2))
    return bars


def _label(work: Work) -> str:
    letter = "W" if work.op is Op.W else _LETTERS[work.part]
    return letter + ("L" if work.chunk < 0 else str(work.chunk) if work.chunks > 1 else "")


# What a program reads.


def _write(shown: Mapping[str, Shown], file: Any) -> None:
    json.dump({name: _document(one) for name, one in shown.items()}, file)
    file.write("\n")


def _document(one: Shown) -> dict[str, Any]:
    return {
        "chunks": {name: choice.chunks for name, choice in one.choices.items()},
        "seconds_by_chunks": {name: choice.seconds for name, choice in one.choices.items()},
        "elapsed": one.timeline.elapsed,
        "ideal": one.ideal,
        "efficiency": one.timeline.efficiency,
        "hidden": one.timeline.hidden,
        "spans": [
            {"lane": LANES[work.lane], "work": str(work), "segment": work.segment, "start": start, "end": end}
            for work, start, end in one.timeline.spans
        ],
    }
