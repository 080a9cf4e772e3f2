"""Training without flush: a shelf of weight versions for each stage, and the sums of the updates under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action, Op, Schedule
from pipeswift.program import Lane
from pipeswift.runtime.async_optimizer import AsyncOptimizer, Sums
from pipeswift.runtime.batch import Part, samples_in, shares
from pipeswift.runtime.recorder import Recorder
from pipeswift.runtime.shelf import Shelf
from pipeswift.runtime.stage import Stage
from pipeswift.runtime.weights import WIDE, Weights
from pipeswift.verify import check_versions
from pipeswift.versions import Versions, WeightPolicy, last_shares, versions


class Asynchronous:
    """What a pipeline without flush has besides: versions of its stages' weights, and updates under way."""

    def __init__(self, stages: Mapping[int, Stage], weights: Mapping[int, Weights], policy: WeightPolicy, every: int):
        self._stages, self._every = stages, every
        self._policy: WeightPolicy = policy
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
        self._completes = {index: frozenset(last_shares(schedule, rank, index, self._every)) for index in self._stages}
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
        """A backward has ended: its gradients join their update, which is made when it has all of this rank's."""
        stage, op, microbatch = action
        shelf, update = self._shelves[stage], microbatch // self._every
        sums = self._sums.setdefault((stage, update), {})
        for name, gradient in shelf.gradients(microbatch):
            wide = gradient if gradient.dtype in WIDE else gradient.float()
            sums[name] = sums[name].add_(wide) if name in sums else wide
        if op is Op.I:
            return
        shelf.release(microbatch)
        if microbatch in self._completes[stage]:
            assert self.optimizer is not None
            self.optimizer.update(stage, self._sums.pop((stage, update)), self._ages[stage][update])
        shelf.publish(microbatch)

    def shares(self, parts: Sequence[Part]) -> list[float]:
        """Each micro-batch's share of the samples of its update."""
        updates = (parts[first : first + self._every] for first in range(0, len(parts), self._every))
        return [share for update in updates for share in shares(update, samples_in(update))]

    def record(self, recorder: Recorder, rank: int) -> None:
        """Of the last run: how many versions of each stage were alive, and when the gradients of copies were summed,
        as W of their stage, with the number of the update in place of a micro-batch's."""
        assert self.optimizer is not None
        recorder.counters = tuple(shelf.counter(rank) for shelf in self._shelves.values())
        for action, start, end in self.optimizer.copies.sums:
            recorder.add(Lane.ALL_TO_ALL, action, start, end)


def plan_of(schedule: Schedule, policy: WeightPolicy, every: int) -> Versions:
    """The versions that a run of `schedule` will use. Raises VersionError, or InvalidSchedule, where it cannot run."""
    plan = versions(schedule, policy, every)
    check_versions(schedule, plan)
    return plan
