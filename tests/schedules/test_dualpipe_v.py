from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from pipeswift import codec
from pipeswift.cost import Costs
from pipeswift.schedules import dualpipe, dualpipe_v
from pipeswift.simulate import replay
from pipeswift.trace import busy_per_rank, makespan
from pipeswift.verify import peak_activations, verify
from tests.schedules.figure import draw, figure_of

SHAPES = [(1, 2), (1, 5), (2, 4), (3, 7), (4, 8), (8, 20)]


def test_dualpipe_v_is_the_figure():
    assert draw(dualpipe_v(2, 4)) == figure_of(dualpipe_v.__doc__)


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_it_is_the_order_that_torch_has(p, m):
    peer = ScheduleDualPipeV.__new__(ScheduleDualPipeV)  # only its generator, which asks for no stages
    peer.pp_group_size, peer._n_microbatches = p, m
    rows = (",".join(map(str, peer._calculate_single_rank_operations(rank))) for rank in range(p))
    assert codec.from_csv("\n".join(rows)).orders == dualpipe_v(p, m).orders


@pytest.mark.parametrize("receive_pool", [1, 2])
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_every_shape_is_valid_within_the_memory_it_claims(p, m, receive_pool):
    """Case 18.6 with p = 1: runs."""
    assert verify(dualpipe_v(p, m), receive_pool=receive_pool, memory_limit=p + 0.5) == []


def test_each_rank_holds_a_share_of_the_model_once():
    """Case 18.4: 2p stages on p ranks, so 2p + 1 chunks alive are p + 1/2 shares; DualPipe on 2p ranks holds 2p + 1."""
    schedule = dualpipe_v(4, 10)
    assert schedule.parameters == 1
    assert peak_activations(schedule).tolist() == [4.5] * 4
    assert dualpipe(8, 20).parameters == 2
    assert peak_activations(dualpipe(8, 20)).tolist() == [9] * 8


@pytest.mark.parametrize(("pair", "seconds", "idle"), [(3, 33, 3), (2, 26, 1.5)])
def test_half_of_dualpipe(pair, seconds, idle):
    """Four ranks do ten micro-batches as eight ranks of DualPipe do twenty, in the time of chunks half as long."""
    schedule = dualpipe_v(4, 10)
    trace = replay(schedule, replace(Costs.uniform(8, chunks=2), overlap=pair / 2))
    assert makespan(trace) == seconds
    assert max(makespan(trace) - busy_per_rank(trace)) == idle == (4 - 1) * (pair + 2 - 3) / 2
    twice = replay(dualpipe(8, 20), replace(Costs.uniform(8), overlap=pair))
    assert makespan(twice) == 2 * seconds
