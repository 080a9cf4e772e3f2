"""Chunks, static schedules, run-time scheduling and capacities against each other, on skewed mixtures of experts.

    sudo .venv/bin/python bench/joint.py [--table NAME] [--steps N] [--pp N] [--microbatches N] [--json FILE]

Stages are emulated: attention and experts sleep for their time, an expert's in proportion to its tokens, but routers,
runtime and all-to-alls over a slow link are real (see turns.py). Systems take turns, step by step, on the same tokens.

ablation, by skew (see `pipeswift.moe.Skew`): 1F1B and the best static schedule (simulated, for loads seen in a few
steps beforehand, among published and searched ones), both policies, and 1F1B with capacities. All but 1F1B may hold
2 pp micro-batches on a stage. step: ms from the first pass's start to the last one's end, mean and deviation. bubble:
of all ranks' time, that in which a rank does not compute. exposed: ms in which a rank does nothing but an all-to-all,
and their share. hidden: of all-to-alls, beside compute. dropped: of the routers' choices. simulated: the step for the
same loads, over measured; static orders and what replan found are replayed, swift decides anew. What the runtime adds
to a pass is taken from the warm-up, in medians by op.

even: equal loads and steady times; medians of a policy's step over the static one's beside it, and simulated.

quality: the quick-start model trained for as many tokens with no token dropped, and with capacities; loss on held-out
text at the end.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, pstdev, quantiles
from typing import Any

import numpy as np

from emulated_moe import Model, Size, whole
from harness import print_row
from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Action, B, F, Op, Schedule
from pipeswift.moe import Skew
from pipeswift.policy import Swift, calibrate
from pipeswift.program import Grain, choose
from pipeswift.report.usage import usage
from pipeswift.search import search
from pipeswift.simulate import measured_costs
from pipeswift.trace import Trace
from turns import EP, Ran, Step, System, take_turns

Row = dict[str, Any]

STRENGTH = 2.0
PATTERNS = ("fixed", "drifting", "bursty")
CAPACITIES = (1.25, 1.0)
PILOT = 3  # steps
SPARSE = 3  # one step in so many is simulated
TRIES = 5000  # orders that the search for a static schedule may try
QUICK_START = Path(__file__).parent.parent / "examples" / "quickstart.toml"


# Static schedules.


def eager(p: int, m: int, limit: int) -> Schedule:
    """1F1B with as many forwards ahead as `limit` micro-batches on a stage allow.

    rank 0  F0 F1 F2 F3 B0 F4 B1 F5 B2 .. B3 .. B4 .. B5
    rank 1     F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5
    """

    def order(rank: int) -> Iterator[Action]:
        warm = min(m, max(limit - 1 - 2 * rank, p - 1 - rank))
        yield from (F(rank, i) for i in range(warm))
        for i in range(m - warm):
            yield F(rank, warm + i)
            yield B(rank, i)
        yield from (B(rank, i) for i in range(m - warm, m))

    return Schedule.one_route(order, ranks=p, microbatches=m, name="eager-1f1b")


def best_static(ran: Ran, limit: int) -> Schedule:
    """The schedule that is fastest, simulated for the loads that 1F1B has met."""
    p, m = ran.system.schedule.num_ranks, ran.system.schedule.num_microbatches
    known = [schedules.build(name, p, m, None) for name in ("1f1b", "zb-h1", "zb-h2")]
    known += [eager(p, m, limit), searched(known[-1], ran, limit)]

    def seconds(schedule: Schedule) -> float:
        model = suited(ran.model, schedule)
        return fmean(last_end(model.run(schedule, step.rows)) for step in ran.steps)

    return min(known, key=seconds)


def searched(split: Schedule, ran: Ran, limit: int) -> Schedule:
    """The best order of F, I and W for the loads of one step; `split` is one of them."""
    whole_costs, costs = (_costs(schedule, ran) for schedule in (ran.system.schedule, split))
    costs = replace(costs, seconds=np.where(np.isnan(costs.seconds), whole_costs.seconds, costs.seconds))
    p, m = split.num_ranks, split.num_microbatches
    found = search(costs, ranks=p, microbatches=m, memory_limit=limit, objective="makespan", work_limit=TRIES)
    return replace(found.schedule, name="searched")


def _costs(schedule: Schedule, ran: Ran) -> Costs:
    model = suited(ran.model, schedule)
    return measured_costs(schedule, model.run(schedule, ran.steps[-1].rows)[0], latency=message(model))


def suited(model: Model, schedule: Schedule) -> Model:
    """The chunks that a pipeline would find for `schedule`, where those of 1F1B are known."""
    if not schedule.splits_backward:
        return model
    own = {**model.own, Op.I: model.own[Op.B]}
    return replace(model, own=own, grains={stage: _split(stage, grain) for stage, grain in model.grains.items()})


def _split(stage: int, grain: Grain) -> Grain:
    if grain.costs is None:
        return grain
    return replace(grain, backward=choose(whole(stage, Op.I), grain.costs, most=Size().experts // EP).chunks)


def chunks_for(schedule: Schedule, pilot: Ran) -> tuple[int, int]:
    """Those of the first stage, for all, so that systems differ in nothing else."""
    grain = suited(pilot.model, schedule).grains[0]
    return grain.forward, grain.backward


def message(model: Model) -> float:
    """Seconds of a micro-batch's way to the next stage."""
    return model.network.message(model.size.message_bytes)


def last_end(traces: Iterable[Trace]) -> float:
    return max(float(trace.end.max()) for trace in traces)


def simulated(ran: Ran, step: Step, model: Model | None = None) -> float:
    """Seconds that the step should have taken. model: if not the system's own."""
    system, model = ran.system, model or ran.model
    if system.policy != "swift":
        return last_end(model.run(step.order, step.rows))
    slots = {(stage, 0): system.in_flight or 1 for stage in range(system.schedule.num_stages)}
    calibration = calibrate(model.run(system.schedule, step.rows)[0])
    policy = Swift(system.schedule, slots, calibration=calibration)
    return last_end(model.run(system.schedule, step.rows, policy, slots))


# Tables.


def ablation(options: argparse.Namespace) -> Iterator[Row]:
    for pattern in options.patterns:
        skew = Skew(pattern, STRENGTH)
        for ran in take_turns(contestants(options, skew), options.steps, Size(), skew):
            yield {"skew": pattern, **judge(ran)}


def contestants(options: argparse.Namespace, skew: Skew) -> list[System]:
    limit = 2 * options.pp
    found = []
    for pilot in pilots(options, skew, ((1, 1), "auto")):
        plain, best = pilot.system.schedule, best_static(pilot, limit)
        chunks = chunks_for(best, pilot)
        found += [
            System("1f1b", plain, chunks=chunks_for(plain, pilot)),
            System(f"best: {best.name}", best, chunks=chunks),
            System("swift", best, "swift", limit, chunks),
            System("replan", best, "replan", limit, chunks),
        ]
    capacities = (found[-4]._replace(name=f"capacity {factor}", capacity=factor) for factor in CAPACITIES)
    return [*found, *capacities]


def pilots(options: argparse.Namespace, skew: Skew | None, chunks: Iterable[Any]) -> list[Ran]:
    """A few steps of 1F1B in as many chunks."""
    plain = schedules.build("1f1b", options.pp, options.microbatches, None)
    return take_turns([System("1f1b", plain, chunks=each) for each in chunks], PILOT, Size(), skew)


def judge(ran: Ran) -> Row:
    seconds = [step.seconds for step in ran.steps]
    shares = [share for step in ran.steps for share in usage(step.trace)]
    busy, exposed, hidden = (fmean(getattr(one, name) for one in shares) for name in ("busy", "exposed", "hidden"))
    return {
        "chunks": ran.chunks,
        "system": ran.system.name,
        "step": 1e3 * fmean(seconds),
        "deviation": 1e3 * pstdev(seconds),
        "bubble %": 100 * (1 - busy),
        "exposed": 1e3 * exposed * fmean(seconds),
        "exposed %": 100 * exposed,
        "hidden %": 100 * hidden / (hidden + exposed),
        "dropped %": 100 * sum(step.dropped for step in ran.steps) / sum(step.asked for step in ran.steps),
        "simulated": fmean(simulated(ran, step) / step.seconds for step in ran.steps[::SPARSE]),
    }


def even(options: argparse.Namespace) -> Iterator[Row]:
    limit = 2 * options.pp
    (pilot,) = pilots(options, None, ["auto"])
    best = best_static(pilot, limit)
    plain = System(best.name, best, chunks=chunks_for(best, pilot))
    policies = [plain._replace(name=policy, policy=policy, in_flight=limit) for policy in ("swift", "replan")]
    static, *others = take_turns([plain, *policies], options.steps, Size(), None)
    for ran in (static, *others):
        expected = simulated(ran, ran.steps[-1], static.model) / simulated(static, static.steps[-1])
        row = {"system": ran.system.name, "chunks": ran.chunks, **against(ran.steps, static.steps)}
        yield row | {"simulated": expected}


def against(steps: Sequence[Step], others: Sequence[Step]) -> Row:
    """Medians, and the quartiles of the ratio of each step to the one beside it."""
    ratios = [one.seconds / other.seconds for one, other in zip(steps, others, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    step = 1e3 * median(step.seconds for step in steps)
    return {"step": step, "over static": middle, "quartiles": f"{low:.4f} to {high:.4f}"}


def quality(options: argparse.Namespace) -> Iterator[Row]:
    for factor in (None, *CAPACITIES):
        lines = [trained(factor, seed) for seed in range(options.seeds)]
        losses = [float(line["held_out"]) for line in lines]
        yield {
            "capacity": "dropless" if factor is None else factor,
            "held-out loss": fmean(losses),
            "least": min(losses),
            "most": max(losses),
            "dropped %": 100 * fmean(dropped(line) for line in lines),
        }


def trained(factor: float | None, seed: int) -> dict[str, str]:
    """The last line of the metrics of a run of the quick start."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.folder={folder}/run", f"train.seed={seed}"]
        settings += [] if factor is None else [f"model.capacity_factor={factor}"]
        overrides = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "pipeswift", "train", str(QUICK_START), *overrides]
        subprocess.run(command, check=True, capture_output=True)
        with open(f"{folder}/run/metrics.csv", encoding="utf-8") as file:
            return list(csv.DictReader(file))[-1]


def dropped(line: dict[str, str]) -> float:
    """The share of the last step's choices."""
    return int(line["dropped"]) / sum(map(int, line["expert_rows"].replace(";", " ").split()))


TABLES = {"ablation": ablation, "even": even, "quality": quality}


def main() -> None:
    parser = argparse.ArgumentParser(description="Chunks, schedules, policies and capacities on skewed experts.")
    parser.add_argument("--table", choices=TABLES, help="only this one")
    parser.add_argument("--steps", type=int, default=30, help="that count, of each system")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind in table quality")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    results: dict[str, list[Row]] = {}
    for name in [options.table] if options.table else TABLES:
        print(f"\n{name}")
        results[name] = []
        for row in TABLES[name](options):
            print_row(row, header=not results[name])
            results[name].append(row)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
