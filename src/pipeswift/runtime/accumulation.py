"""Gradients from step to step: each step's are divided and summed over ranks by themselves, then added up."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from pipeswift.ir import Action
from pipeswift.runtime.assembly import Assembly
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.progress import Progress
from pipeswift.runtime.recorder import Recorder
from pipeswift.runtime.reduction import Reducer
from pipeswift.runtime.ties import sum_gradients
from pipeswift.runtime.weights import Weights


class Accumulation:
    """Of the weights of one rank. reducer: of the gradients over replicas."""

    def __init__(self, peers: Peers, assembly: Assembly, reducer: Reducer, progress: Progress):
        self._peers, self._assembly, self._reducer, self._progress = peers, assembly, reducer, progress
        self._weights = list(assembly.weights.values())
        self._earlier: list[dict[str, Tensor]] = []  # what steps before this one have left
        self._counts = False  # whether the loss function gives (sum, count); known after the first step

    def begin(self) -> None:
        """A step begins."""
        for weights in self._weights:
            weights.withdraw()
        self._earlier = [weights.set_aside(self._of_this_step(weights)) for weights in self._weights]
        self._reducer.begin()

    def fold(self, action: Action) -> None:
        """A backward has ended."""
        for weights in self._weights:  # of all stages: a tied weight belongs to the first that uses it
            weights.fold()

    def finish(self, recorder: Recorder, count: float | None, scale: float) -> None:
        """The step's last backward has ended, on all ranks. count: over the whole batch, for a loss of (sum, count)."""
        with self._progress.joining("the replicas' gradients"):
            self._reducer.finish(recorder)
        if count is not None:
            self._assembly.require_mean()
            self._counts = True
            for weights in self._weights:
                weights.divide(count / scale)
        sum_gradients(self._peers, self._assembly.ties, self._weights)
        for weights, taken in zip(self._weights, self._earlier, strict=True):
            weights.restore(taken)
            weights.publish()

    def _of_this_step(self, weights: Weights) -> Iterable[str]:
        """Parameters whose gradient must be this step's alone until it is done: to be divided, or summed over ranks."""
        if self._counts or self._peers.replicas.size > 1:
            return weights.leaves
        return [tie.holders.get(self._peers.rank, "") for tie in self._assembly.ties]
