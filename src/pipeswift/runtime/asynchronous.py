"""Training without flush: each stage's optimizer steps as soon as its update is due, inside the order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action, Op, Schedule
from pipeswift.runtime.batch import Part, samples_in, shares
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.shelf import Shelf
from pipeswift.runtime.stage import Stage
from pipeswift.runtime.weights import WIDE, Weights
from pipeswift.trace import Counter
from pipeswift.verify import check_versions
from pipeswift.versions import Policy, Versions, versions

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
        peers: Peers,
        weights: Mapping[int, Weights],
        kind: Callable[..., torch.optim.Optimizer],
        settings: dict[str, Any],
        clip_norm: float | None,
        rate: Callable[[Update], float] | None,
    ):
        if clip_norm is not None and not clip_norm >= 0:
            raise PipeSwiftError(f"clip_norm = {clip_norm} is no number from 0: use 1.0, or None to leave gradients be")
        self._peers, self._weights = peers, weights
        self._clip_norm, self._rate = clip_norm, rate
        trained = {stage: [leaf for leaf in w.leaves.values() if leaf.requires_grad] for stage, w in weights.items()}
        self.inner = {stage: kind(leaves, **settings) for stage, leaves in trained.items() if leaves}
        self.updates = dict.fromkeys(weights, 0)  # by stage, over all steps
        self.skipped = 0
        self._norms: dict[int, list[float]] = {stage: [] for stage in weights}  # of the last step

    def gradient_norms(self) -> list[float]:
        """The L2 norm over the whole model of each update of the last step, unclipped. Every rank must call this."""
        mine = torch.tensor(list(self._norms.values()), dtype=torch.float64)
        return self._peers.all_sum(mine.square().sum(0)).sqrt().tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": dict(self.updates), "inner": {stage: o.state_dict() for stage, o in self.inner.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates.update(state["updates"])
        for stage, inner in self.inner.items():
            inner.load_state_dict(state["inner"][stage])

    def begin(self) -> None:
        for norms in self._norms.values():
            norms.clear()

    def update(self, stage: int, sums: Sums, staleness: float) -> None:
        """One update of a stage, from the sums of its gradients; clips by the norm over this stage alone."""
        weights, due = self._weights[stage], Update(stage, self.updates[stage], staleness)
        self.updates[stage] += 1
        total = 0.0  # a left fold, as in the synchronous norm
        for name in weights.leaves:
            total += sums[name].double().square().sum().item() if name in sums else 0.0
        norm = total**0.5
        self._norms[stage].append(norm)
        if not isfinite(norm):
            self.skipped += 1
            return
        if stage not in self.inner:
            return
        for name, gradient in sums.items():
            weights.set_gradient(name, gradient)
        weights.publish()
        if self._clip_norm is not None:
            factor = min(1.0, self._clip_norm / (norm + 1e-6))
            for leaf in weights.leaves.values():
                if leaf.grad is not None:
                    leaf.grad.mul_(factor)
        if self._rate is not None:
            for group in self.inner[stage].param_groups:
                group["lr"] = self._rate(due)
        self.inner[stage].step()
        weights.clear()


class Asynchronous:
    """What a pipeline without flush has besides: versions of its stages' weights, and updates under way."""

    def __init__(self, stages: Mapping[int, Stage], weights: Mapping[int, Weights], policy: Policy, every: int):
        self._stages, self._every = stages, every
        self._policy: Policy = policy
        if policy == "none":
            for stage in stages.values():
                stage.prepare_split()  # I can take other weights than F only in the deferred forms
        self._shelves = {
            index: Shelf(index, stage.layers(), weights[index], stage.ledger if policy == "none" else None)
            for index, stage in stages.items()
        }
        self.optimizer: AsyncOptimizer | None = None

    @contextmanager
    def running(self, schedule: Schedule, rank: int) -> Iterator[None]:
        """Around a run of `schedule`: the stages run on versions inside, and on the optimizer's weights after it."""
        if self.optimizer is None:
            raise PipeSwiftError(
                "an asynchronous pipeline updates its weights within step(): make its optimizer before, with "
                "pipe.async_optimizer(torch.optim.AdamW, lr=3e-4), say"
            )
        plan = plan_of(schedule, self._policy, self._every)
        self._ages = plan.staleness.reshape(schedule.num_stages, -1, self._every).mean(axis=2).tolist()
        self._sums: dict[tuple[int, int], Sums] = {}  # by (stage, update)
        self.optimizer.begin()
        for index, stage in self._stages.items():
            self._shelves[index].begin(plan, rank)
            stage.shelf = self._shelves[index]
        try:
            yield
        finally:
            for index, stage in self._stages.items():
                stage.shelf = None
                self._shelves[index].end()

    def after(self, action: Action) -> None:
        """A backward has ended: its gradients join their update, which is made when it has all of them."""
        stage, op, microbatch = action
        shelf, update = self._shelves[stage], microbatch // self._every
        sums = self._sums.setdefault((stage, update), {})
        for name, gradient in shelf.gradients(microbatch):
            wide = gradient if gradient.dtype in WIDE else gradient.float()
            sums[name] = sums[name].add_(wide) if name in sums else wide
        if op is Op.I:
            return
        shelf.release(microbatch)
        if (microbatch + 1) % self._every == 0:
            assert self.optimizer is not None
            self.optimizer.update(stage, self._sums.pop((stage, update)), self._ages[stage][update])
        shelf.publish(microbatch)

    def shares(self, parts: Sequence[Part]) -> list[float]:
        """Each micro-batch's share of the samples of its update."""
        updates = (parts[first : first + self._every] for first in range(0, len(parts), self._every))
        return [share for update in updates for share in shares(update, samples_in(update))]

    def counters(self, rank: int) -> tuple[Counter, ...]:
        """Of the last run: how many versions of each stage were alive."""
        return tuple(shelf.counter(rank) for shelf in self._shelves.values())


def plan_of(schedule: Schedule, policy: Policy, every: int) -> Versions:
    """The versions that a run of `schedule` will use. Raises VersionError, or InvalidSchedule, where it cannot run."""
    plan = versions(schedule, policy, every)
    check_versions(schedule, plan)
    return plan
