"""What members tell each other arrives, whole and in order, in its own step, and an end is told from a farewell."""

from __future__ import annotations

import os
import signal
from threading import enumerate as threads

import pytest
import torch.distributed as dist

from pipeswift.ir import F, Product, W
from pipeswift.policy import LEADER
from pipeswift.policy.agreement import Arrived, Go, Message
from pipeswift.runtime.channel import Inbox
from pipeswift.runtime.groups import Group, PeerLost
from pipeswift.runtime.hotline import Hotline
from tests.procs import CaseFailed, Pool

SECONDS = 30.0  # at most, for what is bound to come


def hotline(rank: int, world: int) -> tuple[Hotline, Inbox]:
    inbox = Inbox()
    return Hotline(Group(rank, world, dist.group.WORLD), inbox), inbox


def hear(line: Hotline, inbox: Inbox, count: int) -> list[Message]:
    """The next messages of this step."""
    found = list(line.heard())
    while len(found) < count:
        assert inbox.get(timeout=SECONDS) is None
        found += line.heard()
    return found


def reported(member: int, number: int) -> list[Message]:
    return [Arrived(member, Product(i % 2), i, 2 * i) for i in range(number)]


def both_ways(rank: int, world: int, number: int) -> None:
    line, inbox = hotline(rank, world)
    line.begin_step()
    orders = [Go(F(3, i)) for i in range(number)] + [Go(W(70000, 5))]
    if rank == LEADER:
        found = hear(line, inbox, number * (world - 1))
        for member in range(1, world):
            theirs = [each for each in found if isinstance(each, Arrived) and each.member == member]
            assert theirs == reported(member, number)
        line.tell(orders)
        assert line.sent == world - 1
    else:
        for message in reported(rank, number):
            line.tell([message])
        assert hear(line, inbox, len(orders)) == orders
        assert line.sent == number
    line.close()
    assert not [thread for thread in threads() if thread.name.startswith("hotline")]


def test_all_arrives_in_order(procs: Pool):
    procs.run(both_ways, 2000, world=3)


def steps_apart(rank: int, world: int) -> None:
    """The follower is a step behind: what belongs to a step is heard in it, or never."""
    line, inbox = hotline(rank, world)
    line.begin_step()
    if rank == LEADER:
        line.tell([Go(F(0, 0)), Go(F(0, 1))])
        line.begin_step()
        line.tell([Go(F(0, 2))])
        line.begin_step()
        line.tell([Go(F(0, 3))])
        line.tell([Go(F(0, 4))])
        assert hear(line, inbox, 1) == [Arrived(1, Product.OUTPUT, 0, 9)]
    else:
        assert hear(line, inbox, 2) == [Go(F(0, 0)), Go(F(0, 1))]
        assert not list(line.heard())
        line.begin_step()
        line.tell([Arrived(1, Product.OUTPUT, 0, 8)])
        line.begin_step()
        assert hear(line, inbox, 2) == [Go(F(0, 3)), Go(F(0, 4))]
        line.tell([Arrived(1, Product.OUTPUT, 0, 9)])
    dist.barrier()
    line.close()


def test_what_belongs_to_a_step_is_heard_in_it_or_never(procs: Pool):
    procs.run(steps_apart, world=2)


def farewell(rank: int, world: int) -> bool:
    """Whether a member that stays takes no harm of one that closes, which it may go on telling things."""
    line, inbox = hotline(rank, world)
    line.begin_step()
    if rank != LEADER:
        line.close()
    dist.barrier()
    if rank == LEADER:
        for i in range(100):
            line.tell([Go(F(0, i))])
        line.close()
    return all(inbox.get() is None for _ in range(inbox.qsize()))


def test_a_member_may_leave(procs: Pool):
    assert procs.run(farewell, world=2) == [True, True]


def bereft(rank: int, world: int, victim: int) -> None:
    line, inbox = hotline(rank, world)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    found = inbox.get(timeout=SECONDS)
    assert isinstance(found, PeerLost)
    line.close()
    raise found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_dies_is_missed(procs: Pool, victim: int):
    with pytest.raises(CaseFailed, match="PeerLost: the connection to another rank broke"):
        procs.run(bereft, victim, world=2)
