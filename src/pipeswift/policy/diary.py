"""What a policy decided on one rank and why, as counters of a trace."""

from __future__ import annotations

import numpy as np

from pipeswift.policy.base import Rule
from pipeswift.trace import QUEUE_DEPTH, Counter


class Diary:
    """One entry per decision of one step."""

    def __init__(self, rank: int):
        self._rank = rank
        self._times: list[float] = []
        self._rules: list[Rule] = []
        self._depths: list[int] = []

    def note(self, now: float, rule: Rule, depth: int) -> None:
        self._times.append(now)
        self._rules.append(rule)
        self._depths.append(depth)

    def counters(self) -> tuple[Counter, ...]:
        """How often each rule has decided so far, for the rules that did, and how much work was waiting."""
        times, rules = np.array(self._times), np.array(self._rules, dtype=np.int32)
        depth = Counter(QUEUE_DEPTH, self._rank, times, np.array(self._depths))
        return depth, *(
            Counter(rule_name(rule), self._rank, times[rules == rule], np.arange(1, (rules == rule).sum() + 1))
            for rule in Rule
            if (rules == rule).any()
        )


def rule_name(rule: Rule) -> str:
    """What the counter of a rule is called."""
    return f"rule {rule.name.lower()}"


def tally(counters: tuple[Counter, ...], num_ranks: int) -> dict[str, list[int]]:
    """For each rule that decided anything, how often on each rank."""
    counts = {rule.name.lower(): [0] * num_ranks for rule in Rule}
    names = {rule_name(rule): rule.name.lower() for rule in Rule}
    for counter in counters:
        if counter.name in names and len(counter.value):
            counts[names[counter.name]][counter.rank] += int(counter.value[-1])
    return {rule: by_rank for rule, by_rank in counts.items() if any(by_rank)}
