"""Searched schedules run: the gradients are 1F1B's, bit for bit, and the measured peak keeps the limit."""

from __future__ import annotations

import pytest
from torch import Tensor

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Placement, Schedule, loop, vee
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.search import search
from tests.procs import Pool
from tests.runtime.models import batch, builders, same, token_loss
from tests.runtime.test_pipeline import SavedTensors

RANKS, MICROBATCHES, LAYERS = 3, 8, 9


def train_once(rank: int, world: int, every: list[Schedule]) -> list[tuple[dict[str, Tensor], int]]:
    """For each schedule, this rank's gradients and the most activations (of a chunk) that it held."""
    mesh = init_mesh(pp=world)
    results = []
    for schedule in every:
        pipe = Pipeline(
            builders(LAYERS), loss=token_loss, schedule=schedule, microbatches=schedule.num_microbatches, mesh=mesh
        )
        with SavedTensors(list(pipe.stages.values()), pipe.schedule.route_of) as saved:
            pipe.step(*batch(2 * MICROBATCHES))
        results.append(({name: parameter.grad for name, parameter in pipe.named_parameters()}, saved.peak))
        pipe.close()
    return results


def found(placement: Placement, chunks: int, limit: int) -> Schedule:
    costs = Costs.uniform(RANKS * chunks, F=10, I=11, W=8, comm=1, chunks=chunks)
    return search(
        costs,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        chunks=chunks,
        placement=placement,
        memory_limit=limit,
        work_limit=500,
    ).schedule


@pytest.mark.parametrize(("placement", "chunks"), [(loop, 1), (loop, 2), (vee, 2)])
def test_gradients_are_those_of_1f1b_and_memory_keeps_the_limit(procs: Pool, placement: Placement, chunks: int):
    limits = (2, 3, 6)
    every = [schedules.build("1f1b", RANKS, MICROBATCHES), *(found(placement, chunks, limit) for limit in limits)]
    by_rank = procs.run(train_once, every, world=RANKS)

    def gradients(number: int) -> dict[str, Tensor]:
        return {name: gradient for ranks in by_rank for name, gradient in ranks[number][0].items()}

    for number, limit in enumerate(limits, 1):
        assert same(gradients(number), gradients(0))
        assert max(ranks[number][1] for ranks in by_rank) <= limit * chunks
