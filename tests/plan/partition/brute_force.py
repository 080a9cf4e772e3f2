"""Every partition there is, priced from the definitions alone: loops over layers, no prefix sums, no imports."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import inf


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as a sum of so many numbers of at least 1."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(edges))


def least(problem) -> float:
    """The least bottleneck of any partition within memory; infinite when there is none."""
    layers, ranks = len(problem.layers), len(problem.machine)
    if problem.replicate:
        every = (
            (layout, replicas)
            for stages in range(1, min(layers, ranks) + 1)
            for layout in compositions(layers, stages)
            for replicas in compositions(ranks, stages)
        )
    else:
        stages = len(problem.rank_of)
        every = ((layout, (1,) * stages) for layout in compositions(layers, stages))
    return min((bottleneck(problem, layout, replicas) for layout, replicas in every), default=inf)


def bottleneck(problem, layout, replicas) -> float:
    """Infinite when a pin or a rank's memory is not kept."""
    ends = [sum(layout[: s + 1]) for s in range(len(layout))]
    if any(end - 1 in problem.together for end in ends[:-1]) or not problem.apart <= {end - 1 for end in ends}:
        return inf
    stages = [range(end - size, end) for end, size in zip(ends, layout, strict=True)]
    groups, seat = [], 0
    for count in replicas:
        groups.append(
            [problem.rank_of[seat + k] for k in range(count)] if problem.replicate else [problem.rank_of[seat]]
        )
        seat += count
    if not memory_holds(problem, stages, groups):
        return inf
    compute = [stage_seconds(problem, stage, group) for stage, group in zip(stages, groups, strict=True)]
    crossing = [
        2 * problem.layers.output_bytes[stages[s][-1]] / slowest_link(problem, groups[s], groups[s + 1])
        for s in range(len(stages) - 1)
    ]
    if problem.objective == "stage" or problem.replicate:
        around = [(crossing[s - 1] if s else 0, crossing[s] if s < len(crossing) else 0) for s in range(len(stages))]
        if problem.transfers == "within":
            return max(time + before + after for time, (before, after) in zip(compute, around, strict=True))
        return max(*compute, *crossing, 0)
    ranks = range(len(problem.machine))
    total = [sum(time for time, group in zip(compute, groups, strict=True) if group == [rank]) for rank in ranks]
    pairs = {}
    for s, seconds in enumerate(crossing):
        pair = frozenset([*groups[s], *groups[s + 1]])
        pairs[pair] = pairs.get(pair, 0) + seconds
    if problem.transfers == "within":
        return max(total[rank] + sum(s for pair, s in pairs.items() if rank in pair) for rank in ranks)
    return max(*total, *pairs.values(), 0)


def stage_seconds(problem, stage, group) -> float:
    count, machine = len(group), problem.machine
    work = sum(problem.layers.seconds[layer] for layer in stage) / min(machine.speeds[rank] for rank in group)
    if count == 1:
        return work
    weights = sum(problem.layers.parameter_bytes[layer] for layer in stage)
    link = machine.inside if len({machine.hosts[rank] for rank in group}) == 1 else machine.between
    return max(work, 4 * (count - 1) / count * weights / link) / count


def slowest_link(problem, left, right) -> float:
    if left == right:
        return inf
    one_host = len({problem.machine.hosts[rank] for rank in (*left, *right)}) == 1
    return problem.machine.inside if one_host else problem.machine.between


def memory_holds(problem, stages, groups) -> bool:
    used = [0.0] * len(problem.machine)
    for s, (stage, group) in enumerate(zip(stages, groups, strict=True)):
        at = (group[0], len(group) - 1) if problem.replicate else s
        versions = 1 if problem.versions is None else problem.versions[at]
        held = 0 if problem.in_flight is None else problem.in_flight[at]
        for rank in group:
            for layer in stage:
                used[rank] += versions * problem.layers.parameter_bytes[layer] + problem.layers.state_bytes[layer]
                used[rank] += held * problem.layers.saved_bytes[layer]
    return all(mine <= limit for mine, limit in zip(used, problem.machine.memory, strict=True))
