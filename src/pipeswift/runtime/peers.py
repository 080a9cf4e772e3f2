"""The ranks of one pipeline and the groups they talk over, one group per class of traffic.

Forward activations, backward gradients and control messages never queue behind each other.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.meeting import MeshError, connecting, meet, occurrence, register, rendezvous

AXES = ("pp", "dp", "ep", "tp")


class Disagreement(PipeSwiftError):
    """Ranks of one pipeline hold different schedules, layouts, settings or versions."""


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
class Peers:
    """rank, size: this process's place in its pipeline. The groups are None in a pipeline of one."""

    rank: int
    size: int
    device: torch.device
    forward: dist.ProcessGroup | None = None
    backward: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a CPU tensor, in place, on every rank."""
        if self.control is not None:
            with traffic():
                self.control.allreduce([values]).wait()
        return values

    def all_gather(self, thing: Any) -> list[Any]:
        """Every rank's `thing` (anything that pickles), by rank, on every rank."""
        if self.control is None:
            return [thing]
        data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.all_sum(sizes)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = data
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        with traffic():
            self.control.allgather([everyone], [padded]).wait()
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(everyone, sizes.tolist(), strict=True)]


def init_mesh(pp: int = 1, dp: int = 1, ep: int = 1, tp: int = 1, *, timeout: float = 60.0) -> DeviceMesh:
    """A DeviceMesh over the processes that torchrun started, with the axis "pp".

    Starts torch.distributed (gloo on CPU) unless the caller has. Raises MeshError when the number of processes does not
    match, or, on every rank that is there, when some do not start within `timeout` seconds; it names them. Data, expert
    and tensor parallel axes must be 1: they are not supported yet.
    """
    for axis, size in zip(AXES, (pp, dp, ep, tp), strict=True):
        if size < 1:
            raise MeshError(f"{axis} must be at least 1, got {size}")
        if axis != "pp" and size != 1:
            raise MeshError(f"{axis} = {size} is not supported yet: use {axis} = 1")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world != pp:
        raise MeshError(
            f"pp = {pp} needs {pp} processes, but {world} {'is' if world == 1 else 'are'} running: "
            f"start them with torchrun --nproc-per-node {pp}, or set pp = {world}"
        )
    if not dist.is_initialized():
        rank = int(os.environ.get("RANK", "0"))
        alone = world == 1 and "MASTER_ADDR" not in os.environ
        store = HashStore() if alone else rendezvous(rank, world, timedelta(seconds=timeout))
        with connecting("connecting all ranks"):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    else:
        register(_store(), dist.get_rank())
    with connecting("making the mesh"):
        return init_device_mesh("cpu", (pp,), mesh_dim_names=("pp",))


def peers_of(mesh: DeviceMesh | Peers | None, timeout: float = 1800.0) -> Peers:
    """The pipeline that this process belongs to. Every process of the mesh must call this, in the same order."""
    if isinstance(mesh, Peers):
        return mesh
    if mesh is None or mesh.size() == 1:
        return Peers(0, 1, torch.device(mesh.device_type if mesh is not None else "cpu"))
    axis = mesh["pp"] if mesh.mesh_dim_names and "pp" in mesh.mesh_dim_names else mesh
    ranks = axis.mesh.flatten().tolist()
    store, me, patience = _store(), dist.get_rank(), timedelta(seconds=timeout)
    meet(store, f"pipeline {occurrence(store, f'pipelines of rank {me}')}", me, ranks, patience)

    def group() -> dist.ProcessGroup:
        with traffic(), connecting("connecting the pipeline's ranks"):
            made = dist.new_group(ranks, timeout=patience, backend="gloo")
        assert isinstance(made, dist.ProcessGroup)
        return made

    return Peers(
        rank=ranks.index(dist.get_rank()),
        size=len(ranks),
        device=torch.device(mesh.device_type),
        forward=group(),
        backward=group(),
        control=group(),
    )


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def agree(peers: Peers, facts: dict[str, str]) -> None:
    """Compares named facts over all ranks; every rank raises the same Disagreement when one differs.

    A rank that has already failed passes {"error": text}; every rank then raises that text.
    """
    everyone = peers.all_gather(facts)
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            raise Disagreement(theirs["error"] if peers.size == 1 else f"rank {rank}: {theirs['error']}")
    for name, mine in everyone[0].items():
        odd = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != mine]
        if odd:
            raise Disagreement(
                f"ranks disagree on the {name}: rank 0 has {mine}, rank {odd[0]} has {everyone[odd[0]].get(name)}; "
                "start every rank with the same program, config and version"
            )
