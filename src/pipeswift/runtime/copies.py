"""The copies of a stage on other ranks, and the sum of its gradients over all of them, in the middle of an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeswift.ir import Action, Op
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.progress import Progress
from pipeswift.runtime.recorder import clock
from pipeswift.runtime.ties import Tie, sum_gradients
from pipeswift.runtime.weights import Weights


class Copies:
    """weights: of this rank's stages. ties: of the parameters of those that other ranks hold too, each to itself."""

    def __init__(self, peers: Peers, ties: Sequence[Tie], weights: Mapping[int, Weights], progress: Progress):
        self._peers, self._weights, self._progress = peers, weights, progress
        self._ties = {stage: [tie for tie in ties if w.leaves.keys() & tie.names] for stage, w in weights.items()}
        self.sums: list[tuple[Action, float, float]] = []  # in this step: (W of stage and update, start, end)

    def speaks_for(self, stage: int) -> bool:
        """Whether this rank is the stage's first."""
        return all(min(tie.holders) == self._peers.rank for tie in self._ties[stage])

    def sum(self, stage: int, update: int) -> None:
        """The stage's gradients become sums over its ranks, a left fold by rank; waits for all of them."""
        if not (ties := self._ties[stage]):
            return
        ranks = ties[0].ranks
        what = f"the sum of update {update} of stage {stage} over ranks {', '.join(map(str, ranks))}"
        start = clock()
        with self._progress.joining_copies(what, (rank for rank in ranks if rank != self._peers.rank)):
            sum_gradients(self._peers, ties, [self._weights[stage]])
        self.sums.append((Action(stage, Op.W, update), start, clock()))
