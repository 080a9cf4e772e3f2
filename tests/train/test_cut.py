"""The cut of a run: by a profile that rank 0 takes, unless the settings say how, and the same on every rank."""

import pytest
import torch.distributed as dist

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime import init_mesh
from pipeswift.runtime.peers import peers_of
from pipeswift.schedules import build
from pipeswift.train import sample
from pipeswift.train.config import parse
from pipeswift.train.cut import Cut, agree_on_cut, cut_by, even_cut
from tests.plan.profiles import layer, profile

MODEL = {"blocks": 4, "width": 16, "heads": 2, "context": 16}


def settings(**pipeline):
    return parse({"model": MODEL, "pipeline": {"pp": 2, **pipeline}})


def uneven():
    """A head that takes as long as three of the four blocks before it."""
    return profile([layer("embedding", F=0, I=0, W=0), *[layer("block")] * 4, layer("head", F=3, I=3, W=3)])


@pytest.mark.parametrize(("blocks", "stages", "sizes"), [(4, 4, (2, 1, 1, 2)), (5, 2, (4, 3)), (1, 3, (1, 1, 1))])
def test_even_means_blocks(blocks, stages, sizes):
    assert even_cut(blocks, stages) == sizes


def test_a_large_head_has_few_blocks_beside_it():
    assert even_cut(4, 2) == (3, 3)
    assert cut_by(uneven(), build("1f1b", 2, 4), size=1).layout == (5, 1)


def test_where_the_backward_is_split_its_halves_count_by_themselves():
    slow_halves = layer("head", F=1, I=4, W=4).model_copy(update={"B": layer("block").B})
    layers = profile([*[layer("block")] * 3, slow_halves])
    assert cut_by(layers, build("1f1b", 2, 4), size=2).layout == (2, 2)
    assert cut_by(layers, build("zb-h1", 2, 4), size=2).layout == (3, 1)


def agreed(rank, world, config, error):
    """What `agree_on_cut` gives where the measuring gives the uneven profile, or raises."""

    def measured(*_, **__):
        assert rank == 0
        if error:
            raise PipeSwiftError(error)
        return uneven().model_copy(update={"sizes": (config.microbatch, 100)})

    original, sample.measured = sample.measured, measured
    try:
        return agree_on_cut(config, config.build_schedule(), peers_of(init_mesh(pp=world)))
    except PipeSwiftError as caught:
        return str(caught)
    finally:
        sample.measured = original
        dist.barrier()


def test_all_ranks_get_what_rank_0_measured(procs):
    one, other = procs.run(agreed, settings(), "", world=2)
    assert one.layout == (5, 1)
    assert one == other


def test_all_ranks_get_the_error_that_rank_0_met(procs):
    assert procs.run(agreed, settings(), "no such layer", world=2) == ["no such layer"] * 2


@pytest.mark.parametrize(("partition", "layout"), [("even", (3, 3)), ([1, 5], (1, 5))])
def test_the_settings_may_say_how(procs, partition, layout):
    assert procs.run(agreed, settings(partition=partition), "", world=2) == [Cut(layout)] * 2


def test_without_a_choice_nothing_is_measured(procs):
    alone = parse({"model": MODEL, "pipeline": {"pp": 1}})
    assert procs.run(agreed, alone, "nothing to measure", world=1) == [Cut((6,))]
