"""Optimizers that step inside the order: one per stage, each when an update of its stage is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.copies import Copies
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.progress import Progress
from pipeswift.runtime.weights import Weights

Sums = dict[str, Tensor]  # gradients of one update of one stage, by parameter


class Update(NamedTuple):
    """An update that is due. number: those of its stage before it, over all steps.

    staleness: updates between the weights of its gradients and those it changes, mean over its micro-batches.
    """

    stage: int
    number: int
    staleness: float


class AsyncOptimizer:
    """One torch optimizer per stage of this rank; each steps inside `Pipeline.step`, as soon as its update is due.

    inner: by stage, without those that have nothing to train. skipped: updates that a non-finite gradient prevented.
    """

    def __init__(
        self,
        copies: Copies,
        peers: Peers,
        weights: Mapping[int, Weights],
        kind: Callable[..., torch.optim.Optimizer],
        settings: dict[str, Any],
        clip_norm: float | None,
        rate: Callable[[Update], float] | None,
        progress: Progress,
    ):
        if clip_norm is not None and not clip_norm >= 0:
            raise PipeSwiftError(f"clip_norm = {clip_norm} is no number from 0: use 1.0, or None to leave gradients be")
        self.copies, self._peers, self._weights, self._progress = copies, peers, weights, progress
        self._clip_norm, self._rate = clip_norm, rate
        trained = {stage: [leaf for leaf in w.leaves.values() if leaf.requires_grad] for stage, w in weights.items()}
        self.inner = {stage: kind(leaves, **settings) for stage, leaves in trained.items() if leaves}
        self.updates = dict.fromkeys(weights, 0)  # by stage, over all steps
        self.skipped = 0
        self._norms: dict[int, list[float]] = {stage: [] for stage in weights}  # of the last step

    def gradient_norms(self) -> list[float]:
        """The L2 norm over the whole model of each update of the last step, unclipped. Every rank must call this."""
        squares = torch.zeros(len(next(iter(self._norms.values()))), dtype=torch.float64)
        for stage, norms in self._norms.items():
            if self.copies.speaks_for(stage):
                squares += torch.tensor(norms, dtype=torch.float64).square()
        with self._progress.during("gradient norms"), self._progress.joining("the gradient norms"):
            return self._peers.all_sum(squares).sqrt().tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": dict(self.updates), "inner": {stage: o.state_dict() for stage, o in self.inner.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates.update(state["updates"])
        for stage, inner in self.inner.items():
            inner.load_state_dict(state["inner"][stage])

    def begin(self) -> None:
        """A step begins."""
        self.copies.sums.clear()
        for norms in self._norms.values():
            norms.clear()

    def update(self, stage: int, sums: Sums, staleness: float) -> None:
        """One update of a stage, from this rank's sums of its gradients; clips by the norm over this stage alone."""
        weights, due = self._weights[stage], Update(stage, self.updates[stage], staleness)
        self.updates[stage] += 1
        for name, gradient in sums.items():
            weights.set_gradient(name, gradient)
        self.copies.sum(stage, due.number)
        norm = _norm(weights)
        self._norms[stage].append(norm)
        if not isfinite(norm):
            self.skipped += 1
        elif stage in self.inner:
            self._step(due, norm)
        weights.clear()

    def _step(self, due: Update, norm: float) -> None:
        weights, inner = self._weights[due.stage], self.inner[due.stage]
        weights.publish()
        if self._clip_norm is not None:
            factor = min(1.0, self._clip_norm / (norm + 1e-6))
            for leaf in weights.leaves.values():
                if leaf.grad is not None:
                    leaf.grad.mul_(factor)
        if self._rate is not None:
            for group in inner.param_groups:
                group["lr"] = self._rate(due)
        inner.step()


def _norm(weights: Weights) -> float:
    total = 0.0  # a left fold, as in the synchronous norm
    for name in weights.leaves:
        if (gradient := weights.gradient(name)) is not None:
            total += gradient.double().square().sum().item()
    return total**0.5
