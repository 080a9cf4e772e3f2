"""`pipeswift simulate`: the timeline of one schedule under given costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import IO, Annotated, NamedTuple

import typer

from pipeswift import codec
from pipeswift.cli import options, output, policy, source, swings
from pipeswift.cli import weights as updates
from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.policy.diary import tally
from pipeswift.report import first_excess, summarize
from pipeswift.simulate import replay
from pipeswift.trace import Trace
from pipeswift.versions import Versions, with_versions


class Run(NamedTuple):
    """One simulated step."""

    schedule: Schedule
    costs: Costs
    trace: Trace
    plan: Versions | None  # without flush


class OverMemory(PipeSwiftError):
    """A schedule needs more memory than --memory-limit allows."""


def _file(flag: str, what: str):
    return typer.Option(flag, metavar="FILE", help=f'Write {what}; "-" is standard output.')


Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--channel-bandwidth",
        parser=options.number(float, 1, 1e18),
        metavar="BYTES_PER_S",
        help="One channel per direction and pair of ranks: messages queue. Without it, communication is pure latency.",
    ),
]
BoundaryBytes = Annotated[
    float | None,
    typer.Option(
        "--boundary-bytes",
        parser=options.number(float, 0, 1e18),
        metavar="N",
        help="What one micro-batch sends from stage to stage; goes with --channel-bandwidth.",
    ),
]


def simulate(
    name: Annotated[str, typer.Argument(help="A schedule's name, or a .csv or .json file with one.", metavar="NAME")],
    pp: options.Ranks = None,
    microbatches: options.Microbatches = None,
    chunks: options.Chunks = None,
    forward: options.Forward = 1.0,
    input_gradient: options.InputGradient = 1.0,
    weight_gradient: options.WeightGradient = 1.0,
    comm: options.Comm = 0.0,
    overlap_cost: options.OverlapCost = None,
    memory_limit: options.MemoryLimit = None,
    decide: policy.Policy = policy.Choice.follow,
    variability: swings.Variability = None,
    pattern: swings.Pattern = None,
    seeds: swings.Seeds = None,
    channel_bandwidth: Bandwidth = None,
    boundary_bytes: BoundaryBytes = None,
    weights: updates.Weights = None,
    updates_every: updates.UpdatesEvery = None,
    csv: Annotated[str | None, _file("--csv", "the schedule, in torch's action text")] = None,
    json: Annotated[str | None, _file("--json", "the figures")] = None,
    svg: Annotated[str | None, _file("--svg", "the picture")] = None,
    png: Annotated[str | None, typer.Option("--png", metavar="FILE", help="Write the picture.")] = None,
    perfetto: Annotated[str | None, _file("--perfetto", "a trace that opens in Perfetto")] = None,
) -> None:
    """Simulate one step of a schedule; draw it here, or write files. With --variability: many, as figures."""
    targets = {"--csv": csv, "--json": json, "--svg": svg, "--png": png, "--perfetto": perfetto}
    wanted = {setting: target for setting, target in targets.items() if target is not None}
    _check_targets(wanted)
    draws = swings.drawn(variability, pattern, seeds)
    if draws is not None:
        _check_many(wanted, overlap_cost, weights)
    schedule = source.get(name, pp, microbatches, chunks)
    costs = options.uniform(schedule, forward, input_gradient, weight_gradient, comm, overlap_cost)
    costs = _with_channels(costs, channel_bandwidth, boundary_bytes)
    plan = updates.plan_of(schedule, weights, updates_every)
    if memory_limit is not None and decide is policy.Choice.follow:
        _check_memory(schedule, costs, memory_limit)
    unseen = costs if draws is None else draws.costs(schedule, costs, draws.seeds)
    clock = policy.clock(schedule, decide, memory_limit, unseen, plan and plan.every)
    if draws is not None:
        _write_many(swings.simulate(schedule, decide.value, draws, costs, clock), json, title(schedule))
        return
    trace = clock(costs)
    run = Run(schedule, costs, trace if plan is None else with_versions(trace, schedule, plan), plan)
    for setting, target in wanted.items():
        with output.opened(target, setting, binary=setting == "--png") as file:
            _WRITERS[setting](run, file)
    if not wanted:
        _show(run)


def _check_targets(wanted: dict[str, str]) -> None:
    if wanted.get("--png") == "-":
        raise PipeSwiftError("--png - would put a picture's bytes on standard output. Give a file, or use --svg -.")
    on_output = [setting for setting, target in wanted.items() if target == "-"]
    if len(on_output) > 1:
        raise PipeSwiftError(f"{' and '.join(on_output)} cannot share standard output. Give all but one a file.")


def _check_many(wanted: dict[str, str], overlap_cost: float | None, weights: str | None) -> None:
    """What does not go with many seeds."""
    if others := [setting for setting in wanted if setting != "--json"]:
        raise PipeSwiftError(f"{others[0]} shows one step, and --variability makes many. Leave one of the two out.")
    if overlap_cost is not None:
        raise PipeSwiftError("--overlap-cost does not swing, as --variability wants it to. Leave one of the two out.")
    if weights is not None:
        raise PipeSwiftError("--weights is a question of order, not of time. Ask it without --variability.")


def _with_channels(costs: Costs, bandwidth: float | None, boundary_bytes: float | None) -> Costs:
    if bandwidth is None and boundary_bytes is None:
        return costs
    if bandwidth is None or boundary_bytes is None:
        missing = "--channel-bandwidth" if bandwidth is None else "--boundary-bytes"
        raise PipeSwiftError(f"--channel-bandwidth and --boundary-bytes go together. Add {missing}.")
    filled = costs.boundary_bytes + boundary_bytes
    return replace(costs, bandwidth=bandwidth, boundary_bytes=filled, serial_channels=True)


def _check_memory(schedule: Schedule, costs: Costs, limit: float) -> None:
    trace = replay(schedule, costs)
    excess = first_excess(trace, costs.memory, limit)
    if excess is None:
        return
    peak = max(summarize(schedule, trace).peak_activations)
    raise OverMemory(
        f"{schedule.name} does not fit --memory-limit {limit:g}: on rank {excess.rank}, at {excess.time:g} s, "
        f"{excess.action} brings the live activations to {excess.level:g}. "
        f"Use --memory-limit {peak:g} or more, or a schedule that needs less (pipeswift compare)."
    )


def _write_csv(run: Run, file: IO) -> None:
    file.write(codec.to_csv(run.schedule))


def _write_json(run: Run, file: IO) -> None:
    rules = tally(run.trace.counters, run.schedule.num_ranks)
    more = {"rules": rules} if rules else {}
    if run.plan is not None:
        more |= updates.figures(run.schedule, run.plan)._asdict()
    json.dump(asdict(summarize(run.schedule, run.trace)) | more, file)
    file.write("\n")


def _write_many(found: swings.Swings, target: str | None, heading: str) -> None:
    if target is not None:
        with output.opened(target, "--json") as file:
            json.dump(asdict(found), file)
            file.write("\n")
        return
    from pipeswift.report.table import quartiles

    console = output.console()
    console.print(f"{heading}, policy {found.policy}, {found.pattern}, sigma {found.variability:g}", style="bold")
    console.print(quartiles(swings.rows(found), f"{len(found.makespans)} seeds"))


def _write_picture(format: str) -> Callable[[Run, IO], None]:
    def write(run: Run, file: IO) -> None:
        from pipeswift.report import gantt

        gantt.save([run.trace], file, format=format, memory=run.costs.memory, title=title(run.schedule))

    return write


def _write_perfetto(run: Run, file: IO) -> None:
    from pipeswift.report import perfetto

    perfetto.write([run.trace], file, memory=run.costs.memory)


_WRITERS: dict[str, Callable[[Run, IO], None]] = {
    "--csv": _write_csv,
    "--json": _write_json,
    "--svg": _write_picture("svg"),
    "--png": _write_picture("png"),
    "--perfetto": _write_perfetto,
}


def _show(run: Run) -> None:
    from pipeswift.report.table import decisions, facts
    from pipeswift.report.terminal import picture

    console = output.console()
    console.print(title(run.schedule), style="bold")
    console.print(picture(run.trace, console.width))
    console.print(facts({"simulated": summarize(run.schedule, run.trace)}))
    if run.plan is not None:
        console.print(str(updates.figures(run.schedule, run.plan)))
    if rules := tally(run.trace.counters, run.schedule.num_ranks):
        console.print(decisions(rules))


def title(schedule: Schedule) -> str:
    """What the schedule is called and how large it is: "1f1b, 4 ranks, 8 micro-batches"."""
    chunks = f", {schedule.chunks} chunks per rank" if schedule.chunks > 1 else ""
    return f"{schedule.name}, {schedule.num_ranks} ranks{chunks}, {schedule.num_microbatches} micro-batches"
