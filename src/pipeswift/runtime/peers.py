"""The ranks that one rank works with and the groups they talk over, one group per class of traffic.

Forward activations, backward gradients and control messages never queue behind each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.groups import ALONE, Group, Replicas, traffic
from pipeswift.runtime.meeting import MeshError, connecting, meet, occurrence, register, rendezvous

AXES = ("pp", "dp", "ep", "tp")
GRID = ("pp", "dp", "edp", "ep")  # axes of a DeviceMesh, the outermost first; along all but pp, pipelines are copied


class Disagreement(PipeSwiftError):
    """Ranks of one mesh hold different schedules, layouts, settings or versions."""


@dataclass(frozen=True)
class Peers:
    """rank, size: this process's place in its pipeline. The groups are None in a pipeline of one.

    replicas: this process's place among the copies of the pipeline. world: all ranks of all of them, where they are
    more than this pipeline.
    """

    rank: int
    size: int
    device: torch.device
    forward: dist.ProcessGroup | None = None
    backward: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    replicas: Replicas = ALONE
    world: Group | None = None

    @property
    def pipeline(self) -> Group:
        """The ranks of this pipeline."""
        return Group(self.rank, self.size, self.control)

    @property
    def everyone(self) -> Group:
        """The ranks of all pipelines: rank r of replica d is number r * (replicas) + d."""
        return self.world or self.pipeline

    def place(self, rank: int) -> int:
        """Which of `everyone` that rank of this pipeline is."""
        return rank * self.replicas.size + self.replicas.rank

    @property
    def sharers(self) -> tuple[int, ...]:
        """Which of `everyone` share out experts with this process, itself included."""
        group, me = self.replicas.experts, self.place(self.rank)
        return tuple(range(me - group.rank, me - group.rank + group.size))

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over this pipeline's ranks of a CPU tensor, in place, on every rank."""
        return self.pipeline.all_sum(values)

    def all_gather(self, thing: Any) -> list[Any]:
        """The `thing` of every rank of this pipeline (anything that pickles), by rank, on every rank."""
        return self.pipeline.all_gather(thing)


def init_mesh(pp: int = 1, dp: int | None = None, ep: int = 1, tp: int = 1, *, timeout: float = 60.0) -> DeviceMesh:
    """A DeviceMesh over the pp x dp processes that torchrun started: dp replicas of a pipeline of pp ranks.

    Process r * dp + d is rank r of replica d, so replicas of a stage, and first of all the ranks of one expert group,
    are neighbours. The mesh has axis "pp" and, where they are larger than 1, "dp", or "edp" (dp / ep) and "ep".
    Starts torch.distributed (gloo on CPU) unless the caller has.

    pp: ranks of a pipeline.
    dp: replicas of it; by default ep.
    ep: ranks that share out the experts of a layer; divides dp.
    tp: must be 1.
    timeout: seconds that processes wait for each other to start.

    Raises MeshError when the sizes do not fit each other or the number of processes, or, on every rank that is there,
    when some do not start in time; it names them.
    """
    dp = ep if dp is None else dp
    _check_sizes(pp, dp, ep, tp)
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world != pp * dp:
        sizes = f"pp = {pp}" if dp == 1 else f"pp x dp = {pp} x {dp}"
        way_out = f"set pp = {world}" if dp == 1 else f"choose sizes whose product is {world}"
        raise MeshError(
            f"{sizes} needs {pp * dp} processes, but {world} {'is' if world == 1 else 'are'} running: "
            f"start them with torchrun --nproc-per-node {pp * dp}, or {way_out}"
        )
    if not dist.is_initialized():
        rank = int(os.environ.get("RANK", "0"))
        alone = world == 1 and "MASTER_ADDR" not in os.environ
        store = HashStore() if alone else rendezvous(rank, world, timedelta(seconds=timeout))
        with connecting("connecting all ranks"):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    else:
        register(_store(), dist.get_rank())
    replicas = {"dp": dp} if ep == 1 else {"edp": dp // ep, "ep": ep}
    axes = {"pp": pp} | {axis: size for axis, size in replicas.items() if size > 1}
    with connecting("making the mesh"):
        return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _check_sizes(pp: int, dp: int, ep: int, tp: int) -> None:
    for axis, size in zip(AXES, (pp, dp, ep, tp), strict=True):
        if not isinstance(size, int) or size < 1:
            raise MeshError(f"{axis} = {size!r} is no whole number from 1: use {axis} = 1, say")
    if tp != 1:
        raise MeshError(f"tp = {tp}, but tensor parallelism is not there: use tp = 1")
    if dp % ep:
        raise MeshError(
            f"ep = {ep} does not divide dp = {dp}: expert groups are made of whole replicas. Use dp = "
            f"{-(-dp // ep) * ep}, or an ep that divides {dp}"
        )


class Grid(NamedTuple):
    """The processes of a mesh. ranks[r][d]: rank r of the pipeline that is replica d. ep: size of expert groups."""

    ranks: tuple[tuple[int, ...], ...]
    ep: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Grid:
        """Raises MeshError when the mesh has an axis larger than 1 that means nothing here."""
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        if mesh.ndim == 1 and names[0] not in GRID:
            names = ("pp",)  # a mesh of one axis, whatever its name, is a pipeline
        sizes = dict(zip(names, mesh.mesh.shape, strict=True))
        odd = [axis for axis, size in sizes.items() if axis not in GRID and size > 1]
        if odd or len(sizes) < mesh.ndim:
            raise MeshError(
                f"the mesh has axes {mesh.mesh_dim_names} of sizes {tuple(mesh.mesh.shape)}, but a pipeline runs over "
                f"axes named {', '.join(GRID)} alone: use init_mesh, or give that part of the mesh"
            )
        order = sorted(range(mesh.ndim), key=lambda axis: (*GRID, names[axis]).index(names[axis]))
        ranks = mesh.mesh.permute(order).reshape(sizes.get("pp", 1), -1)
        return cls(tuple(map(tuple, ranks.tolist())), sizes.get("ep", 1))


def peers_of(mesh: DeviceMesh | Peers | None, timeout: float = 1800.0) -> Peers:
    """The ranks that this process works with. Every process of the mesh must call this, in the same order."""
    if isinstance(mesh, Peers):
        return mesh
    if mesh is None or mesh.size() == 1:
        return Peers(0, 1, torch.device(mesh.device_type if mesh is not None else "cpu"))
    grid = Grid.of(mesh)
    everyone = [rank for row in grid.ranks for rank in row]
    store, me, patience = _store(), dist.get_rank(), timedelta(seconds=timeout)
    place, numbers = f"pipeline {occurrence(store, f'pipelines of rank {me}')}", count()
    meet(store, place, me, sorted(everyone), patience)

    def group(ranks: Sequence[int]) -> Group:
        number, mine = next(numbers), ranks.index(me)
        if len(ranks) == 1:
            return Group()
        with traffic(), connecting("connecting the mesh's ranks"):
            # torch's new_group would keep it, with its threads and sockets, for as long as there is a world.
            names = PrefixStore(f"{place}/group {number} of {ranks}", store)
            made = dist.ProcessGroupGloo(names, mine, len(ranks), patience)
        return Group(mine, len(ranks), cast(dist.ProcessGroup, made))

    row, replica = divmod(everyone.index(me), len(grid.ranks[0]))
    pipeline = [ranks[replica] for ranks in grid.ranks]
    forward, backward, control = group(pipeline), group(pipeline), group(pipeline)
    replicas = _replicas(grid.ranks[row], replica, grid.ep, group)
    return Peers(
        control.rank,
        control.size,
        torch.device(mesh.device_type),
        forward.handle,
        backward.handle,
        control.handle,
        replicas,
        group(everyone) if replicas.size > 1 else None,
    )


def _replicas(ranks: Sequence[int], mine: int, ep: int, group: Callable[[Sequence[int]], Group]) -> Replicas:
    """ranks: of all replicas of a stage, of which this process is number `mine`."""
    if len(ranks) == 1:
        return ALONE
    first = mine - mine % ep
    gradients = group(ranks)
    return Replicas(
        mine,
        len(ranks),
        control=group(ranks),
        gradients=gradients,
        experts=group(ranks[first : first + ep]),
        expert_replicas=gradients if ep == 1 else group(ranks[mine % ep :: ep]),
    )


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def agree(peers: Peers, facts: dict[str, str]) -> None:
    """Compares named facts over all ranks; every rank raises the same Disagreement when one differs.

    A rank that has already failed passes {"error": text}; every rank then raises that text.
    """
    everyone = peers.everyone.all_gather(facts)
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            raise Disagreement(theirs["error"] if len(everyone) == 1 else f"rank {rank}: {theirs['error']}")
    for name, mine in everyone[0].items():
        odd = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != mine]
        if odd:
            raise Disagreement(
                f"ranks disagree on the {name}: rank 0 has {mine}, rank {odd[0]} has {everyone[odd[0]].get(name)}; "
                "start every rank with the same program, config and version"
            )
