"""`pipeswift search`: the best schedule for given costs and memory, and how far from the best it can be."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from typing import IO, Annotated, Any, NamedTuple

import typer

from pipeswift import __version__, codec
from pipeswift.cli import costs as costs_file
from pipeswift.cli import options, output
from pipeswift.cli.simulate import title
from pipeswift.cli.source import MOST_PASSES
from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import loop, vee
from pipeswift.report import summarize
from pipeswift.search import Found, Progress
from pipeswift.search import search as find
from pipeswift.search.packed import peaks
from pipeswift.simulate import replay

PLACEMENTS = {"loop": loop, "vee": vee}


class Objective(StrEnum):
    span = "span"
    makespan = "makespan"


class Place(StrEnum):
    loop = "loop"
    vee = "vee"


class Outcome(NamedTuple):
    """What was found, under which costs, and what was asked for."""

    found: Found
    costs: Costs
    asked: dict[str, Any]


def _memory(text: str) -> tuple[float, float, float]:
    try:
        changes = tuple(map(float, text.split(",")))
    except ValueError:
        changes = ()
    if len(changes) != 3 or not all(map(math.isfinite, changes)):
        raise typer.BadParameter(f"{text} is not three numbers with commas between. Use 1,0,-1, say.")
    return changes


Ranks = Annotated[int, typer.Option("--pp", parser=options.number(int, 1, 1e9), metavar="P", help="Pipeline ranks.")]
Microbatches = Annotated[
    int,
    typer.Option("--microbatches", parser=options.number(int, 1, 1e9), metavar="M", help="Micro-batches per step."),
]
Chunks = Annotated[
    int, typer.Option("--chunks", parser=options.number(int, 1, 1e9), metavar="V", help="Stages per rank.")
]
Placement = Annotated[
    Place | None,
    typer.Option("--placement", help="Where the stages of several chunks lie; a V if not given."),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        "--memory-limit",
        parser=options.number(float, 1e-9, 1e18),
        metavar="A",
        help="The most a rank may hold, in the unit of --memory; no limit if not given.",
    ),
]
Memory = Annotated[
    Any,
    typer.Option(
        "--memory",
        parser=_memory,
        metavar="F,I,W",
        help="What F adds to a rank's memory from its start, and I and W from their ends; a chunk adds its share.",
    ),
]
CostsFile = Annotated[
    str | None,
    typer.Option("--costs", metavar="FILE", help="Costs by stage, as JSON, instead of -F, -I, -W, --comm, --memory."),
]
Variability = Annotated[
    float,
    typer.Option(
        "--variability",
        parser=options.number(float, 0, 3),
        metavar="SIGMA",
        help="Minimise the mean over draws in which seconds vary by log-normal factors of this sigma.",
    ),
]
TimeLimit = Annotated[
    float,
    typer.Option("--time-limit", parser=options.number(float, 0.01, 1e6), metavar="SECONDS", help="When to stop."),
]


def _file(flag: str, what: str):
    return typer.Option(flag, metavar="FILE", help=f'Write {what}; "-" is standard output.')


def search(
    context: typer.Context,
    pp: Ranks,
    microbatches: Microbatches,
    chunks: Chunks = 1,
    placement: Placement = None,
    forward: options.Forward = 1.0,
    input_gradient: options.InputGradient = 1.0,
    weight_gradient: options.WeightGradient = 1.0,
    comm: options.Comm = 0.0,
    memory_limit: MemoryLimit = None,
    memory: Memory = "1,0,-1",
    costs: CostsFile = None,
    objective: Annotated[Objective, typer.Option("--objective", help="What to minimise.")] = Objective.span,
    variability: Variability = 0.0,
    time_limit: TimeLimit = 8.0,
    csv: Annotated[str | None, _file("--csv", "the schedule, in torch's action text")] = None,
    json: Annotated[str | None, _file("--json", "figures, schedule and costs")] = None,
) -> None:
    """Search for the best schedule under given costs and memory; Ctrl-C takes the best so far."""
    wanted = {setting: target for setting, target in (("--csv", csv), ("--json", json)) if target is not None}
    if list(wanted.values()) == ["-", "-"]:
        raise PipeSwiftError("--csv and --json cannot share standard output. Give all but one a file.")
    if (passes := pp * microbatches * chunks) > MOST_PASSES:
        raise PipeSwiftError(
            f"--pp {pp} times --microbatches {microbatches} times --chunks {chunks} makes {passes:,} forward passes, "
            f"and the most is {MOST_PASSES:,}. Use fewer: the pattern repeats after a few --pp micro-batches."
        )
    if costs is None:
        each = Costs.uniform(
            pp * chunks, F=forward, I=input_gradient, W=weight_gradient, chunks=chunks, comm=comm
        ).with_memory(*(change / chunks for change in memory))
    else:
        _refuse_beside_costs(context)
        each = costs_file.read(costs, ranks=pp, microbatches=microbatches, chunks=chunks)
    place = placement or (Place.vee if chunks > 1 else Place.loop)
    with _progress() as watch:
        found = find(
            each,
            ranks=pp,
            microbatches=microbatches,
            chunks=chunks,
            placement=PLACEMENTS[place],
            memory_limit=memory_limit,
            objective=objective.value,
            variability=variability,
            time_limit=time_limit,
            watch=watch,
        )
    asked = {"objective": objective.value, "memory_limit": memory_limit, "variability": variability}
    outcome = Outcome(found, each, asked | {"placement": place.value, "time_limit": time_limit})
    for setting, target in wanted.items():
        with output.opened(target, setting) as file:
            _WRITERS[setting](outcome, file)
    if not wanted:
        _show(outcome)


def _refuse_beside_costs(context: typer.Context) -> None:
    """A number that --costs overrules is a mistake."""
    flags = {"forward": "-F", "input_gradient": "-I", "weight_gradient": "-W", "comm": "--comm", "memory": "--memory"}
    for name, flag in flags.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise PipeSwiftError(f"{flag} and --costs both say what passes cost. Leave one out.")


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None] | None]:
    """On a terminal, a line that tells how far the search is."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda at: bar.update(
            task, description=f"{at.value:.6g} s, lower bound {at.lower_bound:.6g} s, by {at.method}; Ctrl-C takes it"
        )


def _write_csv(outcome: Outcome, file: IO) -> None:
    file.write(codec.to_csv(outcome.found.schedule))


def _write_json(outcome: Outcome, file: IO) -> None:
    """The figures of `simulate`, those of the search, and the schedule as its own JSON has it, in one object."""
    found, costs, asked = outcome
    measures = {name: getattr(found, name) for name in ("lower_bound", "gap", "optimal", "method", "seconds")}
    provenance = {"program": f"pipeswift {__version__}", "command": "search", **asked, **measures}
    provenance["peak_memory"] = peaks(found.schedule, costs.memory).tolist()
    text = codec.to_json(found.schedule, costs=costs_file.written(costs), provenance=provenance)
    figures = asdict(summarize(found.schedule, replay(found.schedule, costs)))
    document = figures | measures | json.loads(text)
    file.write(
        "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()) + "\n}\n"
    )


_WRITERS: dict[str, Callable[[Outcome, IO], None]] = {"--csv": _write_csv, "--json": _write_json}


def _show(outcome: Outcome) -> None:
    from pipeswift.report.table import facts
    from pipeswift.report.terminal import picture

    found, costs, asked = outcome
    trace = replay(found.schedule, costs)
    console = output.console()
    console.print(title(found.schedule), style="bold")
    console.print(picture(trace, console.width))
    console.print(facts({"simulated": summarize(found.schedule, trace)}))
    peak = peaks(found.schedule, costs.memory).max()
    limit = "" if asked["memory_limit"] is None else f", limit {asked['memory_limit']:g}"
    console.print(f"{_verdict(found, asked)}\npeak memory {peak:g}{limit}")


def _verdict(found: Found, asked: dict[str, Any]) -> str:
    what = f"mean {asked['objective']}" if asked["variability"] else asked["objective"]
    proof = "optimal" if found.optimal else f"at most {100 * found.gap:.3g} % above the best"
    return (
        f"{what} {found.value:.6g} s, lower bound {found.lower_bound:.6g} s: {proof}; "
        f"by {found.method}, {found.seconds:.1f} s of search"
    )
