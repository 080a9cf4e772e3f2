"""What is known of a run after each step, and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeswift.ir import Schedule
from pipeswift.program import Grain
from pipeswift.trace import Trace
from pipeswift.train.cut import Cut


@dataclass(frozen=True)
class Row:
    """A point of a run: `step` optimizer steps are done. Losses are nats per byte.

    held_out: where it was evaluated. training: of the step that led here; none before the first.
    """

    step: int
    held_out: float | None = None
    training: Step | None = None


@dataclass(frozen=True)
class Step:
    """One optimizer step. gradient_norm: before clipping. seconds: from its first flush to its last weight.

    utilization: for each rank of the first replica, the share of the last flush that it spent in passes.
    expert_rows: for each mixture of experts, in the last flush, how many choices fell on each expert; expert_load: on
        the busiest, over an even share. dropped: how many choices found no room. balance: mean load-balance loss.
        saved: the share of the dispatches' bytes that a smaller payload saved. For dense models, nothing.
    """

    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    tokens_per_second: float
    utilization: tuple[float, ...]
    expert_load: tuple[float, ...] = ()
    expert_rows: tuple[tuple[int, ...], ...] = ()
    dropped: int = 0
    balance: float | None = None
    saved: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A finished run of `schedule`, the model cut by `cut`. late_steps: the timelines of its last steps, by replica.

    first_held_out, held_out: before and after training. tokens_per_second: median over the steps. seconds: of training,
    evaluations included. grains: by stage, in how many chunks experts were, where ranks shared these out. cores: of
    this machine, shared by `ranks_here` ranks of `threads` threads each.
    """

    schedule: Schedule
    cut: Cut
    late_steps: tuple[tuple[Trace, ...], ...]
    first_held_out: float
    held_out: float
    tokens_per_second: float
    seconds: float
    grains: Mapping[int, Grain]
    cores: int
    ranks_here: int
    threads: int
