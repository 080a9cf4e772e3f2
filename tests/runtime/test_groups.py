"""Ranks that talk to each other."""

import torch
import torch.distributed as dist

from pipeswift.runtime.groups import Group

SIZES = [[1, 2, 0], [0, 3, 1], [4, 0, 0]]  # of the rows from each rank to each


def everyone(rank: int, world: int) -> Group:
    return Group(rank, world, dist.group.WORLD)


def rows_between(rank, world, dtype):
    """A row says who sent it, to whom, and its number."""
    sent = torch.tensor([[rank, to, number] for to in range(world) for number in range(SIZES[rank][to])], dtype=dtype)
    received = torch.empty(sum(row[rank] for row in SIZES), 3, dtype=dtype)
    everyone(rank, world).all_to_all(received, sent.view(-1, 3), [row[rank] for row in SIZES], SIZES[rank])
    return received.tolist()


def test_rows_go_where_they_should(procs):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rank, rows in enumerate(procs.run(rows_between, dtype, world=3)):
            assert rows == [[source, rank, number] for source in range(3) for number in range(SIZES[source][rank])]


def equal_parts(rank, world):
    received = torch.empty(2 * world)
    everyone(rank, world).all_to_all(received, torch.arange(2.0 * world) + 10 * rank)
    return received.tolist()


def test_without_sizes_everyone_gets_as_much(procs):
    assert procs.run(equal_parts, world=2) == [[0, 1, 10, 11], [2, 3, 12, 13]]


def many_in_a_row(rank, world):
    group, seen = everyone(rank, world), []
    for number in range(50):
        received = torch.empty(world, dtype=torch.int64)
        group.all_to_all(received, torch.full((world,), number))
        seen.append(received.tolist())
    return seen


def test_one_all_to_all_does_not_mix_with_the_next(procs):
    for seen in procs.run(many_in_a_row, world=3):
        assert seen == [[number] * 3 for number in range(50)]


def test_a_group_of_one_keeps_what_it_has():
    received = torch.empty(3)
    Group().all_to_all(received, torch.arange(3.0))
    assert received.tolist() == [0, 1, 2]
