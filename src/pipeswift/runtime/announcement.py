"""Numbers that a few ranks will know at the end of a step and that all ranks want, such as the losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeswift.runtime.groups import traffic
from pipeswift.runtime.peers import Peers

TAG = 2  # on the control group


class Announcement:
    """A table, of which each holder knows some rows. like: one of its shape and dtype.

    The others post their receives when the step begins, so at its end, when the holders have long been done, nothing
    is left to wait for. Every rank of the pipeline must make one, with the same arguments.
    """

    def __init__(self, peers: Peers, holders: Sequence[int], like: Tensor):
        self._peers, self._mine = peers, peers.rank in holders
        others = [holder for holder in holders if holder != peers.rank]
        self._parts = [torch.empty_like(like) for _ in others]
        control = peers.control
        with traffic():
            self._works = [
                control.recv([part], holder, TAG)
                for part, holder in zip(self._parts, others, strict=True)
                if control is not None
            ]

    def settle(self, known: Tensor) -> Tensor:
        """The whole table. known: what this rank knows of it, zeros elsewhere."""
        control = self._peers.control
        with traffic():
            if self._mine and control is not None:
                others = (rank for rank in range(self._peers.size) if rank != self._peers.rank)
                self._works += [control.send([known], rank, TAG) for rank in others]
            for work in self._works:
                work.wait()
        return torch.stack([known, *self._parts]).sum(0)
