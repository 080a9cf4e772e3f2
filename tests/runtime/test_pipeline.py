"""Real processes over gloo give what a plain loop gives, bit for bit."""

from __future__ import annotations

import weakref
from collections import defaultdict
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.stage import Stage
from pipeswift.simulate import replay, run
from pipeswift.trace import peak_memory
from tests.procs import Pool
from tests.runtime.models import batch, builders, plain_loop, same, token_loss

LAYERS = 9
MICROBATCHES = (1, 2, 3, 5, 8)


class Case(NamedTuple):
    schedule: str
    chunks: int
    microbatches: int


def cases(ranks: int) -> list[Case]:
    """Every synchronous schedule, at every shape that it allows."""
    return [
        Case(entry.name, entry.chunks, m)
        for entry, m in product(schedules.entries(), MICROBATCHES)
        if entry.flush and all(rule.holds(ranks, m) for rule in entry.rules)
    ]


class SavedTensors:
    """Counts the activations that are alive: by weak references to what autograd saved, and by what I left for W."""

    def __init__(self, stages: list[Stage], route_of: tuple[int, ...]):
        self._stages = stages
        self._call_of = [route_of[: i + 1].count(route) for i, route in enumerate(route_of)]
        self._now: tuple[int, int] | None = None  # (stage on this rank, call)
        self._calls: dict[int, int] = defaultdict(int)
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak = 0
        for number, stage in enumerate(stages):
            stage.segments[0].layers[0].register_forward_pre_hook(lambda *_, number=number: self._begin(number))

    def _begin(self, number: int) -> None:
        self._calls[number] += 1
        self._now = number, self._calls[number]

    def __enter__(self) -> SavedTensors:
        class Box:
            def __init__(box, tensor: Tensor):
                box.tensor, box.call = tensor, self._now

        def pack(tensor: Tensor) -> Box:
            box = Box(tensor)
            self._alive.add(box)
            self.peak = max(self.peak, len(self._live()))
            return box

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def left(self) -> int:
        return len(self._live())

    def _live(self) -> set[tuple[int, int]]:
        """(stage on this rank, call); the k-th micro-batch of a stage's route is its call k + 1."""
        waiting = {(n, self._call_of[i]) for n, stage in enumerate(self._stages) for i, _ in stage._pendings}
        return {box.call for box in self._alive} | waiting


def train_once(rank: int, world: int, every: list[Case]) -> list[tuple[tuple[float, ...], dict[str, Tensor], int, int]]:
    mesh = init_mesh(pp=world)
    results = []
    for case in every:
        pipe = Pipeline(
            builders(LAYERS),
            loss=token_loss,
            schedule=case.schedule,
            chunks=case.chunks,
            microbatches=case.microbatches,
            mesh=mesh,
        )
        with SavedTensors(list(pipe.stages.values()), pipe.schedule.route_of) as saved:
            result = pipe.step(*batch(2 * case.microbatches))
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        done = np.stack([result.trace.stage, result.trace.op, result.trace.microbatch], axis=1)
        assert np.array_equal(done, pipe.schedule.orders[rank].rows), "what ran is not what the schedule says"
        results.append((result.losses, gradients, saved.peak, saved.left()))
        pipe.close()
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_equals_the_plain_loop(procs: Pool, ranks: int):
    every = cases(ranks)
    assert len(every) >= 15
    by_rank = procs.run(train_once, every, world=ranks)
    for number, case in enumerate(every):
        losses, gradients = plain_loop(builders(LAYERS), *batch(2 * case.microbatches), case.microbatches)
        piped: dict[str, Tensor] = {}
        for rank in range(ranks):
            assert list(by_rank[rank][number][0]) == losses, case
            piped |= by_rank[rank][number][1]
        schedule = schedules.build(case.schedule, ranks, case.microbatches, case.chunks)
        if schedule.parameters == 1:
            assert same(piped, gradients), case
        else:  # sums over two copies
            assert all(torch.allclose(piped[name], gradients[name], rtol=1e-5, atol=1e-7) for name in gradients), case
        costs = Costs.uniform(schedule.num_stages, chunks=case.chunks)
        timeline = replay(schedule, costs)
        assert np.array_equal(run(schedule, costs).start, timeline.start), "event loop and replay differ"
        simulated = peak_memory(timeline, costs.memory) * case.chunks
        assert [by_rank[rank][number][2] for rank in range(ranks)] == np.rint(simulated).tolist(), case
        assert all(by_rank[rank][number][3] == 0 for rank in range(ranks)), "activations outlive the step"
