"""What a rank says of itself, in the words of the schedule."""

from __future__ import annotations

import pytest

from pipeswift.ir import F, Op, Product
from pipeswift.policy import Agreed, Ready, slots_of
from pipeswift.policy.agreement import Arrived, Go
from pipeswift.program import Part, Work
from pipeswift.runtime.groups import PeerLost
from pipeswift.runtime.progress import Progress, Run, last_done, now_doing
from pipeswift.schedules import build


def under_way(rank: int) -> tuple[Progress, Run]:
    """A rank at the start of a 1F1B step on three ranks."""
    schedule = build("1f1b", 3, 4)
    progress = Progress()
    progress.phase = "step 1"
    progress.run = Run(schedule, rank, Ready(schedule, rank, slots_of(schedule)))
    return progress, progress.run


def test_it_waits_for_an_output():
    progress, _ = under_way(rank=1)
    assert now_doing(progress) == ("waits: F of stage 1, micro-batch 0 needs the output of stage 0 from rank 0", (0,))


def agreeing(member: int) -> tuple[Progress, Agreed]:
    """A rank in the middle of three, one of two that share out experts: ranks 2 and 3 of six."""
    schedule = build("1f1b", 3, 4)
    ready = Agreed(schedule, 1, slots_of(schedule), member, members=2)
    progress = Progress(place=lambda rank: 2 * rank + member, sharers=(2, 3))
    progress.phase, progress.run = "step 1", Run(schedule, 1, ready)
    return progress, ready


def test_it_waits_for_the_word_of_the_one_that_leads():
    progress, ready = agreeing(member=1)
    ready.arrive(Product.OUTPUT, 0, 0)
    assert now_doing(progress) == ("waits for rank 2 to say what comes first", (2,))
    ready.hear(Go(F(1, 0)))
    assert now_doing(progress) == ("about to start F of stage 1, micro-batch 0", ())
    ready.start(F(1, 0))
    ready.finish(F(1, 0))
    run = progress.run
    assert run is not None
    run.started.append(F(1, 0))
    run.ended += 1
    ready.arrive(Product.OUTPUT, 0, 1)
    assert now_doing(progress) == ("waits for rank 2 to say what comes after F of stage 1, micro-batch 0", (2,))


def test_it_waits_for_what_has_been_promised():
    progress, ready = agreeing(member=1)
    ready.hear(Go(F(1, 0)))
    text = "waits: F of stage 1, micro-batch 0 needs the output of stage 0 from rank 1"
    assert now_doing(progress) == (text, (1,))


def test_the_one_that_leads_waits_for_a_report():
    progress, ready = agreeing(member=0)
    ready.arrive(Product.OUTPUT, 0, 0)
    lacks = "that rank 3 says it has the output of stage 0"
    assert now_doing(progress) == (f"waits: F of stage 1, micro-batch 0 needs {lacks}", (3,))
    ready.hear(Arrived(1, Product.OUTPUT, 0, 0))
    assert now_doing(progress) == ("about to start F of stage 1, micro-batch 0", ())


def test_it_is_busy():
    progress, run = under_way(rank=1)
    run.started.append(F(1, 0))
    assert now_doing(progress) == ("busy: F of stage 1, micro-batch 0", ())
    assert last_done(progress) == ""


def test_it_waits_for_a_gradient():
    progress, run = under_way(rank=1)
    for microbatch in range(2):
        run.ready.arrive(Product.OUTPUT, 0, microbatch)
        run.ready.start(F(1, microbatch))
        run.ready.finish(F(1, microbatch))
        run.started.append(F(1, microbatch))
        run.ended += 1
    assert last_done(progress) == "F of stage 1, micro-batch 1"
    assert now_doing(progress) == ("waits: B of stage 1, micro-batch 0 needs the gradient of stage 2 from rank 2", (2,))


def test_it_waits_for_an_all_to_all():
    progress, run = under_way(rank=1)
    run.started.append(F(1, 2))
    progress.sharers = (2, 3)
    before = progress.position()
    progress.exchange = lambda: Work(F(1, 2), Part.DISPATCH, 0, Op.F, chunk=1, chunks=2)
    text = "F of stage 1, micro-batch 2 needs the all-to-all dispatch (layer with experts 0, chunk 1 of 2)"
    assert now_doing(progress) == (f"waits: {text} with ranks 2, 3", (2, 3))
    assert progress.position() != before


def test_it_waits_for_all():
    progress = Progress()
    with progress.during("optimizer"):
        assert now_doing(progress) == ("busy: optimizer", ())
        with progress.joining("the gradient norm"):
            assert now_doing(progress) == ("waits for all ranks: the gradient norm", ())
    assert now_doing(progress) == ("its own program", ())


def test_every_move_is_seen():
    progress, run = under_way(rank=0)
    positions = [progress.position()]
    run.started.append(F(0, 0))
    positions.append(progress.position())
    run.ended += 1
    positions.append(progress.position())
    assert len(set(positions)) == 3


def test_an_error_is_told_with_the_place_and_forgotten_at_the_next_call():
    progress, told = Progress(), []
    progress.alert = lambda: told.append(progress.error)
    with pytest.raises(ValueError, match="boom"), progress.during("step 1"):
        raise ValueError("boom")
    with progress.during("step 1"):
        pass
    assert told == ["step 1: ValueError: boom", ""]
    assert progress.call == 2


def test_a_broken_connection_waits_for_the_verdict():
    progress, asked = Progress(), []
    progress.await_verdict = lambda: asked.append(now_doing(progress)[0])
    with pytest.raises(PeerLost), progress.during("step 1"):
        raise PeerLost("gone")
    assert asked == ["lost the connection to a rank"]
