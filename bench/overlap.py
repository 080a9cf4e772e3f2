"""How much of an MoE layer's communication hides behind its compute, and whether the number of chunks is well chosen.

    .venv/bin/python bench/overlap.py [--table NAME] [--repeat N] [--json FILE]

One layer, forward and backward, by the ratio of communication (dispatch and combine) to compute. The runtime's own
lanes run the programs; experts and link are emulated: they sleep for their modelled time.

low, high: at low latency, and at one above a chunk's compute; chunks are chosen from what sleeping and lanes are
measured to take, the ideal is of what they should. shaped: the same experts, but real all-to-alls of 2 ranks
over a network that is held to a rate (see shaped_link.py; needs root), chunks chosen from what was measured there.
presets: simulated only, under links like NVLink's, InfiniBand's and Ethernet's. grid: the same for 280 cases together.

serial, one: efficiency, max(compute, communication) / elapsed, when nothing overlaps, and of our program in one chunk.
roots: the two square-root formulas. thumb: the chunks at which one chunk's communication takes .6 to 1.2 of its
compute. chosen, best: what `choose` says, and the fastest of a sweep from 1 to 16. ideal: the two-lane ideal at the
chosen number, over what it took. loss %: how much longer than the best that was. spread %: half the range of its runs.
one %, root %, thumb %: the loss of one chunk, of the formula for the longer side, and of what the rule allows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from harness import launch
from pipeswift.ir import Action, Op
from pipeswift.program import (
    LINKS,
    BlockCosts,
    Form,
    Kind,
    Lane,
    Line,
    Part,
    Program,
    Step,
    Work,
    bound,
    choose,
    chunk,
    compile_action,
    formulas,
    rule_of_thumb,
    simulate,
)
from pipeswift.rehearse.kernels import sleep_until
from pipeswift.runtime.lanes import Call, Lanes, handshake
from shaped_link import ShapedLink, exchange, posted

Row = dict[str, Any]
Elapsed = dict[int, list[float]]  # seconds of every run, by number of chunks; 0 is serial

COMPUTE = 0.2  # seconds of the experts' F, I and W each
START = 0.001  # seconds that each chunk of them takes besides
MOST = 16  # experts per rank, and so the most chunks
SWEEP = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
RATIOS = (0.3, 0.6, 0.9, 1.2, 2.0)
LATENCIES = {"low": 0.001, "high": 0.2}
PASSES = (Op.F, Op.B)
RANKS, MBIT = 2, 100


def one_layer(op: Op) -> Program:
    return compile_action(Action(0, op, 0), layout=(Form.MOE,), takes=False, sends=False)


def serial(program: Program) -> Program:
    """The same works, each launch waited for at once."""
    steps: list[Step] = []
    for step in program.steps:
        if step.kind is not Kind.WAIT:
            steps.append(step)
            if step.kind is Kind.LAUNCH:
                steps.append(Step(Kind.WAIT, step.work))
    return Program(tuple(steps), program.after)


def layer_costs(op: Op, ratio: float, exchange: Line) -> BlockCosts:
    """A layer whose two all-to-alls take, but for their latencies, `ratio` of its compute."""
    experts = {op: Line(START, COMPUTE) for op in Op}
    compute = COMPUTE * (1 if op is Op.F else 2)
    return BlockCosts(exchange, ratio * compute / 2 / exchange.each, experts)


def useful(program: Program, costs: BlockCosts) -> float:
    """max(compute, communication) of a layer in one chunk, seconds; what the efficiency counts as work done."""
    timeline = simulate(program, costs)
    return max(timeline.busy(Lane.COMPUTE), timeline.busy(Lane.ALL_TO_ALL))


def tried(program: Program, costs: BlockCosts, numbers: Iterable[int]) -> list[int]:
    return sorted({*numbers, choose(program, costs, most=MOST).chunks})


def judge(op: Op, ratio: float, costs: BlockCosts, known: BlockCosts, elapsed: Elapsed) -> Row:
    """A row of the table. costs: of the ideal. known: by which the number of chunks is chosen."""
    program = one_layer(op)
    seconds = {number: median(runs) for number, runs in elapsed.items()}
    chosen = choose(program, known, most=MOST).chunks
    best = min((number for number in seconds if number), key=seconds.__getitem__)
    runs = elapsed[chosen]
    work = useful(program, costs)
    return {
        "pass": op.name,
        "ratio": ratio,
        "serial": work / seconds[0],
        "one": work / seconds[1],
        **guesses(program, known),
        "chosen": chosen,
        "best": best,
        "ms": 1e3 * seconds[chosen],
        "spread %": 50 * (max(runs) - min(runs)) / seconds[chosen],
        "ideal": bound(chunk(program, chosen), costs) / seconds[chosen],
        "loss %": 100 * (seconds[chosen] / seconds[best] - 1),
        "efficiency": work / seconds[chosen],
    }


def guesses(program: Program, costs: BlockCosts) -> Row:
    thumb = rule_of_thumb(program, costs, MOST)
    return {
        "roots": " ".join(f"{root:.1f}" for root in formulas(program, costs)),
        "thumb": f"{thumb[0]}-{thumb[-1]}" if thumb else "none",
    }


# What runs.

Run = Callable[[Program, Mapping[Work, Call]], float]  # elapsed seconds


def sweep(op: Op, numbers: Iterable[int], repeat: int, call_of: Callable[[Work], Call], run: Run) -> Elapsed:
    """The numbers take turns, so that all see the same machine."""
    programs = {0: serial(one_layer(op))} | {number: chunk(one_layer(op), number) for number in numbers}
    calls = {number: {work: call_of(work) for work in program.works} for number, program in programs.items()}
    elapsed: Elapsed = {number: [] for number in programs}
    for _ in range(repeat):
        for number, program in programs.items():
            elapsed[number].append(run(program, calls[number]))
    return elapsed


def emulated(latency: float, numbers: Iterable[int], repeat: int) -> Iterator[Row]:
    lanes = Lanes()
    start = found_start(lanes)
    for op, ratio in product(PASSES, RATIOS):
        costs = layer_costs(op, ratio, Line(latency, 1e-9))
        known = replace(costs, exchange=found_exchange(lanes, costs), experts={op: Line(start, COMPUTE) for op in Op})
        elapsed = sweep(
            op,
            tried(one_layer(op), known, numbers),
            repeat,
            lambda work, costs=costs: partial(_spend, costs(work)),
            lambda program, calls: lanes.run(program, calls).elapsed,
        )
        yield judge(op, ratio, costs, known, elapsed)
    lanes.close()


def found_start(lanes: Lanes) -> float:
    """Seconds that a chunk of the experts takes besides its share: late ends of sleeps and a launch with its waking."""
    late = []
    for share in (1 / 4, 1 / 8, 1 / 16) * 3:
        start = perf_counter()
        _spend(START + COMPUTE * share)
        late.append(perf_counter() - start - COMPUTE * share)
    return median(late) + handshake(lanes)


def found_exchange(lanes: Lanes, costs: BlockCosts) -> Line:
    """The emulated all-to-all as it is in the lane's thread."""
    seconds = {}
    for size in (costs.sent / 2, costs.sent / 8, costs.sent / 16):
        launches = [lanes.launch(Lane.ALL_TO_ALL, partial(_spend, costs.exchange(size))) for _ in range(4)]
        for launched in launches:
            launched.wait()
        seconds[size] = median(launched.end - launched.start for launched in launches[1:])
    return Line.fit(seconds)


def _spend(seconds: float) -> None:
    sleep_until(perf_counter() + seconds)


def shaped(repeat: int) -> list[Row]:
    with ShapedLink(RANKS, MBIT) as link:
        line, rows = launch(_over_link, repeat, world=RANKS, network=link)[0]
    print(f"{RANKS} ranks held to {MBIT} Mbit/s: found {1e3 * line.fixed:.2f} ms and {8e-6 / line.each:.0f} Mbit/s")
    return rows


def _over_link(rank: int, world: int, repeat: int) -> tuple[Line, list[Row]]:
    """What one rank does; all get the same rows."""
    line = exchange_line()
    lanes = Lanes()
    start = torch.tensor(found_start(lanes))
    dist.all_reduce(start, dist.ReduceOp.MAX)

    def run(program: Program, calls: Mapping[Work, Call]) -> float:
        dist.barrier()
        elapsed = torch.tensor([lanes.run(program, calls).elapsed])
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return elapsed.item()

    rows = []
    for op, ratio in product(PASSES, RATIOS):
        costs = layer_costs(op, ratio, line)
        known = replace(costs, experts={op: Line(start.item(), COMPUTE) for op in Op})
        numbers = tried(one_layer(op), known, SWEEP)
        elapsed = sweep(op, numbers, repeat, lambda work, costs=costs: _over(costs, work, world), run)
        rows.append(judge(op, ratio, costs, known, elapsed))
    lanes.close()
    return line, rows


def exchange_line() -> Line:
    """An all-to-all of all ranks, by the bytes that leave each."""
    return Line.fit(exchange([64, 1 << 17, 1 << 19, 1 << 21], repeat=5))


def _over(costs: BlockCosts, work: Work, world: int) -> Call:
    """A work over a real link: experts sleep, tokens are sent."""
    if work.lane is not Lane.ALL_TO_ALL:
        return partial(_spend, costs(work))
    rows = 2 if work.part is Part.COUNTS else round(costs.sent / work.chunks / 4 / (world - 1))
    sent = torch.zeros(world, rows)
    return partial(posted, torch.empty_like(sent), sent)


# Simulated only.

TOKENS = (8192, 2048, 512)  # per rank
WIDTH, HIDDEN, TOP_K, GROUP = 4096, 2048, 8, 8
FLOPS = 400e12  # per second, assumed
KERNEL = 20e-6  # seconds that a chunk of the experts takes besides, assumed


def losses(program: Program, costs: BlockCosts) -> dict[int, float]:
    """By number of chunks, how many per cent longer than the best number it takes, simulated."""
    seconds = {number: simulate(chunk(program, number), costs).elapsed for number in range(1, MOST + 1)}
    return {number: 100 * (elapsed / min(seconds.values()) - 1) for number, elapsed in seconds.items()}


def rooted(program: Program, costs: BlockCosts) -> int:
    """The number of chunks that the formula for the longer side says."""
    whole = simulate(program, costs)
    root = formulas(program, costs)[whole.busy(Lane.ALL_TO_ALL) > whole.busy(Lane.COMPUTE)]
    return round(min(max(root, 1), MOST))


def presets() -> Iterator[Row]:
    """Experts of three matrices of WIDTH x HIDDEN in 2-byte numbers, TOP_K per token, over GROUP ranks."""
    for name, tokens, op in product(LINKS, TOKENS, PASSES):
        compute = tokens * TOP_K * 6 * WIDTH * HIDDEN / FLOPS
        sent = tokens * TOP_K * WIDTH * 2 * (GROUP - 1) / GROUP
        costs = BlockCosts(LINKS[name].line, sent, {op: Line(KERNEL, compute) for op in Op})
        program = one_layer(op)
        loss, whole = losses(program, costs), simulate(program, costs)
        chosen = choose(program, costs, most=MOST).chunks
        elapsed = simulate(chunk(program, chosen), costs).elapsed
        thumb = [loss[number] for number in rule_of_thumb(program, costs, MOST)]
        yield {
            "link": name,
            "tokens": tokens,
            "pass": op.name,
            "ratio": whole.busy(Lane.ALL_TO_ALL) / whole.busy(Lane.COMPUTE),
            **guesses(program, costs),
            "chosen": chosen,
            "best": min(loss, key=loss.__getitem__),
            "ms": 1e3 * elapsed,
            "loss %": loss[chosen],
            "one %": loss[1],
            "root %": loss[rooted(program, costs)],
            "thumb %": f"{min(thumb):.1f}-{max(thumb):.1f}" if thumb else "none",
            "efficiency": useful(program, costs) / elapsed,
        }


def grid() -> Iterator[Row]:
    """What each way to choose loses, over cases from cheap to dear in latency, kernel start and communication."""
    found: dict[str, list[float]] = {"chosen": [], "root": [], "one": [], "thumb, best": [], "thumb, worst": []}
    picked: dict[Op, list[int]] = {op: [] for op in PASSES}
    ratios, latencies, starts = (0.1, 0.3, 0.6, 0.9, 1.2, 2, 4), (1e-4, 1e-3, 0.01, 0.05, 0.2), (1e-4, 1e-3, 0.01, 0.05)
    for op, ratio, latency, start in product(PASSES, ratios, latencies, starts):
        costs = BlockCosts(Line(latency, 1.0), ratio / 2, {op: Line(start, 1.0) for op in Op})
        program = one_layer(op)
        loss = losses(program, costs)
        picked[op].append(choose(program, costs, most=MOST).chunks)
        found["chosen"].append(loss[picked[op][-1]])
        found["root"].append(loss[rooted(program, costs)])
        found["one"].append(loss[1])
        if thumb := [loss[number] for number in rule_of_thumb(program, costs, MOST)]:
            found["thumb, best"].append(min(thumb))
            found["thumb, worst"].append(max(thumb))
    for name, loss in found.items():
        near = sum(each <= 5 for each in loss) / len(loss)
        row = {"way": name, "cases": len(loss), "mean %": sum(loss) / len(loss), "max %": max(loss)}
        yield row | {"within 5 %": near}
    differ = sum(forward != backward for forward, backward in zip(*picked.values(), strict=True))
    print(f"forward and backward want different numbers in {differ} of {len(picked[Op.F])} cases")


def main() -> None:
    parser = argparse.ArgumentParser(description="How much of an MoE layer's communication hides behind its compute.")
    parser.add_argument("--table", help="only this one: low, high, shaped, presets or grid")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each program")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    tables: dict[str, Callable[[], Iterable[Row]]] = {
        "low": partial(emulated, LATENCIES["low"], SWEEP, arguments.repeat),
        "high": partial(emulated, LATENCIES["high"], (1, 2), arguments.repeat),
        "shaped": partial(shaped, arguments.repeat),
        "presets": presets,
        "grid": grid,
    }
    if arguments.table is not None and arguments.table not in tables:
        parser.error(f"there is no table {arguments.table}: use one of {', '.join(tables)}")
    results: dict[str, list[Row]] = {}
    for name, table in tables.items():
        if arguments.table in (None, name):
            print(f"\n{name}")
            results[name] = []
            for row in table():
                show(row, header=not results[name])
                results[name].append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def show(row: Row, header: bool) -> None:
    widths = [max(len(name), 9) for name in row]
    if header:
        print(" ".join(name.rjust(width) for name, width in zip(row, widths, strict=True)))
    cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values())
    print(" ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


if __name__ == "__main__":
    main()
