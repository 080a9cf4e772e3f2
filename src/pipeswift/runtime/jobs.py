"""Jobs: what a caller hands to a step or an evaluation, cut into micro-batches and put in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.policy import source_order
from pipeswift.runtime.assembly import Assembly
from pipeswift.runtime.batch import (
    Part,
    Rules,
    arranged,
    check_names,
    common_size,
    cut,
    cut_arguments,
    samples_in,
    shares,
)
from pipeswift.runtime.boundary import Flat
from pipeswift.runtime.calls import Job
from pipeswift.runtime.loss import LossFunction, StepLoss
from pipeswift.runtime.outcome import Where
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.progress import Progress
from pipeswift.runtime.seeds import mix


@dataclass(frozen=True)
class Jobs:
    """The maker of one pipeline's jobs; the parameters are those of `Pipeline`."""

    peers: Peers
    progress: Progress
    assembly: Assembly
    loss: LossFunction
    split: Rules
    seed: int
    dynamic_shapes: bool
    cost_of: Callable[[Any], float] | None

    def make(
        self,
        inputs: Any,
        targets: Any,
        arguments: Mapping[str, Any],
        schedule: Schedule,
        step: int,
        scale: float,
        outputs: Where | None,
    ) -> Job:
        """What one run of `schedule` works on; all else as for `Pipeline.step`. Every rank must call this."""
        if outputs not in (None, "last", "all"):
            raise PipeSwiftError(f'outputs = {outputs!r} is none of "last", "all" and None: use "last", say')
        check_names(arguments, self.assembly.keywords, "step() and evaluate() got")
        count, stages = schedule.num_microbatches, self.assembly.stages
        size = common_size(inputs, targets)
        first = self.peers.replicas.rank * count
        job = Job(mix(self.seed, step), step, first, keep_outputs=outputs is not None, scale=scale)
        parts = cut(inputs, count, "inputs") if 0 in stages else []
        job.order = self._source_order(parts)
        job.arguments = arranged(cut_arguments(arguments, count, self.split, size), job.order)
        if parts:
            place = self._place(parts)
            job.inputs = arranged([part.flat(*place) for part in parts], job.order)
            job.uniform = (
                not self.dynamic_shapes and not job.order and all(_alike(i, job.inputs[0]) for i in job.inputs)
            )
        if schedule.num_stages - 1 in stages and not (schedule.forward_only and targets is None):
            parts = arranged(cut(targets, count, "targets"), job.order)
            job.loss = self._loss(parts, scale)
            job.samples = None if isinstance(targets, list) else [part.samples for part in parts]
        return job

    def _loss(self, parts: Sequence[Part], scale: float) -> StepLoss:
        """parts: of the targets."""
        if not callable(self.loss):
            raise PipeSwiftError(f"loss = {self.loss!r} is no function: give one of (output, target)")
        _, size = self._place(parts)
        loss = StepLoss(self.loss, [part.value for part in parts], shares(parts, size), scale)
        if self.assembly.asynchronous:
            loss.of_update = self.assembly.asynchronous.shares(parts)
        return loss

    def _source_order(self, parts: Sequence[Part]) -> Sequence[int] | None:
        """In which order micro-batches enter, the same on all ranks, and on all replicas that share out experts, where
        those of one number meet. parts: of the inputs, where this rank has them."""
        if self.cost_of is None:
            return None
        costs = [_cost(self.cost_of(part.value), number) for number, part in enumerate(parts)]
        with self.progress.joining("the order of micro-batches"):
            if parts:
                costs = list(map(sum, zip(*self.peers.replicas.experts.all_gather(costs), strict=True)))
            return next(filter(None, self.peers.all_gather(source_order(costs))))

    def _place(self, parts: Sequence[Part]) -> tuple[int, int]:
        """(samples on replicas before this one, samples on all)."""
        with self.progress.joining("the replicas' numbers of samples"):
            return self.peers.replicas.place(samples_in(parts))


def _cost(found: Any, microbatch: int) -> float:
    try:
        cost = float(found)
    except (TypeError, ValueError):
        cost = nan
    if isnan(cost):
        raise PipeSwiftError(f"cost_of gives {found!r} for micro-batch {microbatch}: have it return a number")
    return cost


def _alike(one: Flat, other: Flat) -> bool:
    return (one.spec, one.samples) == (other.spec, other.samples)
