"""Ranks that talk to each other: the groups of a mesh, and this rank's place in each."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeswift.errors import PipeSwiftError


class PeerLost(PipeSwiftError):
    """The connection to another rank broke."""


def peer_lost(error: Exception) -> PeerLost:
    return PeerLost(f"the connection to another rank broke: {str(error).splitlines()[0]}")


@contextmanager
def traffic() -> Iterator[None]:
    """What the transport raises inside becomes PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise peer_lost(error) from error


@dataclass(frozen=True)
class Group:
    """rank, size: this process's place in the group. handle: its transport, None in a group of one."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a CPU tensor, in place, on every rank. Exact only where one rank has a number and
        the others zero; see `fold` for sums of many."""
        if self.handle is not None:
            with traffic():
                self.handle.allreduce([values]).wait()
        return values

    def all_gather(self, thing: Any) -> list[Any]:
        """Every rank's `thing` (anything that pickles), by rank, on every rank."""
        if self.handle is None:
            return [thing]
        data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.all_sum(sizes)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = data
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        with traffic():
            self.handle.allgather([everyone], [padded]).wait()
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(everyone, sizes.tolist(), strict=True)]

    def fold(self, values: Tensor) -> Tensor:
        """The sum over ranks of a tensor of one dimension, on every rank: of each element a left fold by rank.

        So its bits do not depend on where in the tensor an element stands, which those of a ring's sum do. A rank sums
        its own part of all, then all gather the parts: as many bytes as a ring sends.
        """
        if self.handle is None:
            return values
        part = -(-len(values) // self.size)
        sent = values.new_zeros(self.size * part)
        sent[: len(values)] = values
        parts = torch.empty_like(sent)
        self.all_to_all(parts, sent)
        with traffic():
            first, *rest = parts.view(self.size, part)
            for row in rest:
                first += row
            self.handle._allgather_base(sent, first).wait()
        return sent[: len(values)]

    def all_to_all(
        self, received: Tensor, sent: Tensor, into: Sequence[int] | None = None, out_of: Sequence[int] | None = None
    ) -> None:
        """Rows of `sent` to all ranks, out_of[r] of them to rank r, and theirs into `received`, into[r] from rank r.

        By default as many for each. On a CPU receives are posted before anything is sent. gloo's own all-to-all posts
        them after: a rank that comes late then sends all that it has before the others' turn.
        """
        if self.handle is None:
            received.copy_(sent)
        elif received.device.type == "cpu":
            self._swap(_parts(received, into, self.size), _parts(sent, out_of, self.size))
        else:
            with traffic():
                self.handle.alltoall_base(received, sent, list(into or ()), list(out_of or ())).wait()

    def _swap(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        assert self.handle is not None
        received[self.rank].copy_(sent[self.rank])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        with traffic():
            takes = [self.handle.recv([received[rank]], rank, 0) for rank in others if len(received[rank])]
            gives = [self.handle.send([sent[rank]], rank, 0) for rank in others if len(sent[rank])]
            for work in (*takes, *gives):
                work.wait()

    def spread(self, values: Tensor) -> None:
        """Gives every rank the values that rank 0 has, in place."""
        if self.handle is not None:
            with traffic():
                self.handle.broadcast(values, 0).wait()


def _parts(rows: Tensor, sizes: Sequence[int] | None, ranks: int) -> Sequence[Tensor]:
    return rows.chunk(ranks) if sizes is None else rows.split(list(sizes))


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same stages as this one, one per replica of the pipeline (axis dp of the mesh).

    control: for small numbers. gradients: for the reductions. experts: consecutive replicas that share out the experts
    of every layer (axis ep). expert_replicas: those that hold the same experts as this one; for their reductions.
    """

    rank: int = 0
    size: int = 1
    control: Group = Group()
    gradients: Group = Group()
    experts: Group = Group()
    expert_replicas: Group = Group()

    def place(self, samples: int) -> tuple[int, int]:
        """(samples on replicas before this one, samples on all), where this one has so many."""
        if self.size == 1:
            return 0, samples
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = samples
        self.control.all_sum(counts)
        return int(counts[: self.rank].sum()), int(counts.sum())


ALONE = Replicas()
