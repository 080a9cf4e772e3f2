"""Which ranks work together: the axes of a mesh, and the groups that a rank gets from it."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime import Pipeline
from pipeswift.runtime.groups import Group
from pipeswift.runtime.peers import Grid, MeshError, init_mesh, peers_of
from tests.procs import Pool
from tests.runtime.models import batch, builders, token_loss


def neighbours(rank: int, world: int, sizes: dict[str, int]) -> dict[str, list[int]]:
    mesh = init_mesh(**sizes)
    assert Grid.of(mesh).ep == sizes.get("ep", 1)
    peers = peers_of(mesh)
    replicas = peers.replicas
    groups = {
        "pipeline": peers.pipeline,
        "everyone": peers.everyone,
        "replicas": replicas.control,
        "gradients": replicas.gradients,
        "experts": replicas.experts,
        "expert replicas": replicas.expert_replicas,
    }
    assert peers.everyone.rank == peers.place(peers.rank) == rank
    assert (peers.rank, replicas.rank) == divmod(rank, replicas.size)
    return {name: group.all_gather(rank) for name, group in groups.items()}


def test_replicas_of_a_stage_are_neighbours_and_expert_groups_consecutive(procs: Pool):
    got = procs.run(neighbours, {"pp": 1, "dp": 4, "ep": 2}, world=4)
    assert got[2] == {
        "pipeline": [2],
        "everyone": [0, 1, 2, 3],
        "replicas": [0, 1, 2, 3],
        "gradients": [0, 1, 2, 3],
        "experts": [2, 3],
        "expert replicas": [0, 2],
    }


def test_dp_is_ep_where_it_is_not_given(procs: Pool):
    got = procs.run(neighbours, {"pp": 2, "ep": 2}, world=4)
    assert got[3] == {
        "pipeline": [1, 3],
        "everyone": [0, 1, 2, 3],
        "replicas": [2, 3],
        "gradients": [2, 3],
        "experts": [2, 3],
        "expert replicas": [3],
    }


def own_mesh(rank: int, world: int) -> list[str]:
    def refusal(*names: str) -> str:
        with pytest.raises(MeshError) as caught:
            peers_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=names or None))
        return str(caught.value)

    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    assert Grid.of(theirs) == Grid(((0, 2), (1, 3)), ep=1)
    assert peers_of(theirs).replicas.control.all_gather(rank) == [rank % 2, rank % 2 + 2]
    assert peers_of(theirs["pp"]).everyone.all_gather(rank) == [rank // 2 * 2, rank // 2 * 2 + 1]
    return [refusal("pp", "cp"), refusal()]


def test_a_mesh_of_the_callers_own_may_have_the_axes_in_any_order(procs: Pool):
    named, nameless = procs.run(own_mesh, world=4)[0]
    assert "axes ('pp', 'cp') of sizes (2, 2), but a pipeline runs over axes named pp, dp, edp, ep alone" in named
    assert "axes None of sizes (2, 2)" in nameless


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"pp": 0}, "pp = 0 is no whole number from 1"),
        ({"pp": 2, "dp": 2, "ep": 4}, "ep = 4 does not divide dp = 2: .* Use dp = 4"),
        ({"pp": 2, "tp": 2}, "tp = 2, but tensor parallelism is not there: use tp = 1"),
        ({"pp": 2, "dp": 3}, "pp x dp = 2 x 3 needs 6 processes, but 1 is running: .*--nproc-per-node 6"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], says: str):
    with pytest.raises(MeshError, match=says):
        init_mesh(**sizes)


def fold(rank: int, world: int, size: int) -> torch.Tensor:
    group = Group(rank, world, dist.group.WORLD)
    return group.fold(torch.full((size,), [1e8, 1.0, -1e8][rank]))


@pytest.mark.parametrize("size", [1, 7])
def test_a_fold_adds_in_the_order_of_ranks_wherever_an_element_stands(procs: Pool, size: int):
    expected = torch.tensor(1e8) + 1.0 - 1e8
    assert expected == 0.0, "the order does not show"
    for got in procs.run(fold, size, world=3):
        assert torch.equal(got, expected.expand(size))


def lifetimes(rank: int, world: int) -> list[tuple[int, int]]:
    """(open files, threads of any kind) after each of some pipelines has ended; a refused one counts as ended, too."""
    mesh, left = init_mesh(pp=2, dp=2), []
    for policy in ("swift", "swift", "none such", "swift"):
        with suppress(PipeSwiftError):
            pipe = Pipeline(builders(3), loss=token_loss, microbatches=2, mesh=mesh, policy=policy)
            pipe.step(*batch(4))
            pipe.close()
            del pipe
        left.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return left


def test_the_groups_of_a_pipeline_end_with_it(procs: Pool):
    # They stayed in torch's list of groups, with 2 threads and some 3 sockets each, as long as the world did.
    for _, second, *others in procs.run(lifetimes, world=4):
        assert all(files <= second[0] and threads <= second[1] for files, threads in others)
