"""What a run came to: its losses and outputs, on the ranks that want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.announcement import Announcement
from pipeswift.runtime.calls import Job
from pipeswift.runtime.loss import blank_table
from pipeswift.runtime.peers import Peers

Where = Literal["last", "all"]


class Losses:
    """The losses of one run, by micro-batch of all replicas, on the ranks that hold the last stage or on all.

    Every rank of the pipeline must make one before the run, with the same arguments. holders: those that hold the last
    stage.
    """

    def __init__(self, peers: Peers, holders: Sequence[int], microbatches: int, where: Where):
        if where not in ("last", "all"):
            raise PipeSwiftError(f'losses = {where!r} is neither "last" nor "all": use "all"')
        self._peers, self._holds = peers, peers.rank in holders
        self._table = blank_table(microbatches * peers.replicas.size)
        self._announced = Announcement(peers, holders, like=self._table) if where == "all" else None

    def collect(self, job: Job) -> Tensor:
        """The table of the whole batch (see `blank_table`), once `job` is done. Every rank must call this."""
        if job.loss is not None:
            mine = job.loss.table()
            rows = range(len(mine)) if job.order is None else job.order
            self._table[[job.first + row for row in rows]] = mine
        if self._holds:
            self._peers.replicas.control.all_sum(self._table)
        if self._announced is not None:
            return self._announced.settle(self._table)
        if job.loss is not None and job.loss.counts:
            raise PipeSwiftError('losses="last" needs a loss function that gives a mean: (sum, count) needs all ranks')
        return self._table


def collect_outputs(peers: Peers, job: Job, where: Where | None) -> tuple[Any, ...] | None:
    """What the model gave, in the caller's order of micro-batches; None where nothing. Every rank must call this."""
    outputs = job.outputs
    if where == "all":
        outputs = {i: output for theirs in peers.all_gather(outputs) for i, output in theirs.items()}
    order = sorted(outputs, key=job.order.__getitem__ if job.order else None)
    return tuple(outputs[i] for i in order) or None
