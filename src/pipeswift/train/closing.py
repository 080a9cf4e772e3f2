"""What a run says when it is over: a step as predicted and as measured, rank by rank, and what was achieved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from pipeswift.ir import Op
from pipeswift.policy import Rule
from pipeswift.policy.diary import tally
from pipeswift.program import BlockCosts, Grain
from pipeswift.report import summarize
from pipeswift.report.imbalance import imbalance
from pipeswift.report.straggler import straggler
from pipeswift.report.table import facts, imbalances, rules, usages
from pipeswift.report.usage import usage
from pipeswift.trace import PLANNING, PLANS, QUEUE_DEPTH, Trace
from pipeswift.train.comparison import Comparison
from pipeswift.train.metrics import Outcome

T = TypeVar("T")
_SHOWN = 16


def close(outcome: Outcome, comparison: Comparison, folder: Path) -> None:
    """Prints the closing table."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    both = {"predicted": comparison.predicted, "measured": comparison.passes}
    copies = len(comparison.replicas)
    whose = f", of the first of {copies} copies of the pipeline" if copies > 1 else ""
    console.print(f"A late step of median length{whose}:")
    console.print(facts({title: summarize(comparison.schedule, trace) for title, trace in both.items()}))
    console.print(f"The step took {comparison.error:+.1%} against the replay of the durations measured in it.")
    for table in tables(comparison.replicas, outcome.cut.layout):
        console.print()
        console.print(table)
    console.print()
    for line in chain(_plans(outcome.late_steps[-1][0]), _grains(outcome.grains)):
        console.print(line)
    if (slow := straggler(outcome.late_steps)) is not None:
        console.print(str(slow))
    sizes = " ".join(map(str, outcome.cut.layout[:_SHOWN]))
    console.print(f"Layers per stage: {sizes}{', cut by profile.json' if outcome.cut.profile else ''}.")
    threads, ranks = outcome.threads, outcome.ranks_here
    console.print(
        f"{_count(ranks, 'rank')} of {_count(threads, 'thread')} shared {_count(outcome.cores, 'core')}"
        + ("; a pass lasts longer while it waits for a core." if ranks * threads > outcome.cores else ".")
    )
    console.print(
        f"Held-out loss {outcome.first_held_out:.3f} -> {outcome.held_out:.3f} nats per byte; "
        f"{outcome.tokens_per_second:,.0f} tokens/s; {outcome.seconds:.1f} s of training."
    )
    console.print(f"{folder} has config.toml, metrics.csv, timeline.svg and trace.json (opens in ui.perfetto.dev).")


def tables(replicas: Sequence[Trace], layout: Sequence[int]) -> Iterator[Table]:
    """Of one step, by rank: what its time went into, and the rules of a policy; by stage: how uneven loads were.

    replicas: the step's traces. layout: layers per stage. What a run does not have, no table is of.
    """
    ranks = [f"rank {rank}" for rank in range(replicas[0].num_ranks)]
    if len(replicas) > 1:
        ranks = [f"{rank}, replica {replica}" for rank in ranks for replica in range(len(replicas))]
    yield usages(dict(zip(ranks, _rank_by_rank([usage(trace) for trace in replicas]), strict=True)))
    if counts := _decisions(replicas):
        yield rules(ranks, counts, _rank_by_rank([_waiting(trace) for trace in replicas]))
    if uneven := imbalance(replicas, layout):
        yield imbalances(uneven)


def text_of(tables: Iterable[Table]) -> str:
    """As they are printed, 80 characters wide at most."""
    console = Console(width=80, color_system=None, markup=False, highlight=False)
    with console.capture() as printed:
        for table in tables:
            console.print(table)
            console.print()
    return printed.get().rstrip()


def _decisions(replicas: Sequence[Trace]) -> dict[str, list[int]]:
    """How often each rule decided on each rank, for rules that did on some."""
    counts = [tally(trace.counters, trace.num_ranks) for trace in replicas]
    none = [0] * replicas[0].num_ranks
    found = {rule.name.lower(): [of.get(rule.name.lower(), none) for of in counts] for rule in Rule}
    return {rule: _rank_by_rank(of) for rule, of in found.items() if any(map(any, of))}


def _waiting(trace: Trace) -> list[int]:
    """By rank, how many micro-batches waited there at most."""
    most = [0] * trace.num_ranks
    for counter in trace.counters:
        if counter.name == QUEUE_DEPTH:
            most[counter.rank] = int(counter.value.max(initial=0))
    return most


def _rank_by_rank(replicas: Sequence[Sequence[T]]) -> list[T]:
    """What the ranks of each replica have, those of one rank side by side."""
    return [one for of_rank in zip(*replicas, strict=True) for one in of_rank]


def _plans(trace: Trace) -> Iterator[str]:
    """How often the order was planned in all steps up to this one, for a policy that plans."""
    told = {counter.name: counter.value[-1] for counter in trace.counters if counter.name in (PLANS, PLANNING)}
    if made := int(told.get(PLANS, 0)):
        yield f"The order was planned {_count(made, 'time')}, in {1e3 * told[PLANNING] / made:.1f} ms each."


def _grains(grains: Mapping[int, Grain]) -> Iterator[str]:
    """In how many chunks experts were, and from which costs, averaged over stages, if they were measured."""
    if not grains:
        return
    shown = ", ".join(f"{grain.forward}/{grain.backward}" for grain in list(grains.values())[:_SHOWN])
    yield f"Chunks of a rank's experts, forward/backward, by stage: {shown}."
    if costs := [grain.costs for grain in grains.values() if grain.costs is not None]:
        mean = BlockCosts.mean(costs)
        exchange, forward = mean.exchange, mean.experts[Op.F]
        yield (
            f"Measured: an all-to-all takes {1e3 * exchange.fixed:.2f} ms + {1e3 * mean.sent * exchange.each:.2f} ms "
            f"for {mean.sent / 1e6:.2f} MB, experts {1e3 * forward.fixed:.2f} ms a chunk + {1e3 * forward.each:.2f} ms."
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
