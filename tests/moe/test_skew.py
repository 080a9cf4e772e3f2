"""A skewed router has favourites that depend on seed, step, layer and micro-batch alone, and is exact all the same."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeswift.errors import PipeSwiftError
from pipeswift.moe import MoE, Skew
from pipeswift.moe.router import Router
from pipeswift.moe.skew import PACE
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.context import Place, mark
from pipeswift.runtime.seeds import mix
from tests.moe.models import builders, expert_block, plain_loop
from tests.procs import Pool
from tests.runtime.models import Embed, Head, batch, same, token_loss

MICROBATCHES = 6
SKEWS = [Skew("fixed", 3.0), Skew("drifting", 3.0), Skew("bursty", 6.0)]


def at(*, key: int = 0, layer: int = 1, step: int = 0, microbatch: int = 0) -> Place:
    return Place(key, layer, 0, 0, [], step, microbatch)


def test_fixed_favourites_are_the_first_quarter_of_the_experts():
    skew = Skew("fixed")
    assert [skew.favourites(experts, at(step=3, microbatch=2)) for experts in (2, 4, 8)] == [(0,), (0,), (0, 1)]


def test_drifting_favourites_move_on_every_few_steps():
    skew = Skew("drifting")
    seen = [skew.favourites(4, at(step=step))[0] for step in range(4 * PACE)]
    assert seen == [(seen[0] + step // PACE) % 4 for step in range(4 * PACE)]
    assert len({skew.favourites(64, at(layer=layer)) for layer in range(4)}) == 4, "layers begin elsewhere"
    assert all((first + 1) % 8 == second for first, second in (skew.favourites(8, at(layer=n)) for n in range(8)))


def test_bursts_come_in_a_quarter_of_the_micro_batches_and_to_every_expert():
    skew, key = Skew("bursty"), mix(7, 1)
    seen = [skew.favourites(4, at(key=key, microbatch=microbatch)) for microbatch in range(800)]
    counts = Counter(seen)
    assert 550 < counts[()] < 650
    assert counts.keys() == {(), (0,), (1,), (2,), (3,)}
    assert seen == [skew.favourites(4, at(key=key, step=9, microbatch=microbatch)) for microbatch in range(800)]
    assert seen != [skew.favourites(4, at(key=key, layer=2, microbatch=microbatch)) for microbatch in range(800)]
    assert seen != [skew.favourites(4, at(key=key + 1, microbatch=microbatch)) for microbatch in range(800)]


def test_tokens_go_to_the_favourites():
    router = Router(4, 8, 2, skew=Skew("fixed", 1.0))
    nn.init.zeros_(router.weight)
    choice = router(torch.randn(3, 5, 4))
    assert choice.experts.sort().values.tolist() == [[0, 1]] * 15
    assert choice.balance.item() == pytest.approx(8 * 2 * 0.5 * torch.tensor([1.0, 1, *[0] * 6]).softmax(0)[0].item())


def test_no_random_number_of_the_model_is_used_up():
    drawn = []
    for skew in (None, *SKEWS):
        torch.manual_seed(0)
        MoE(4, experts=4, hidden=4, skew=skew)(torch.ones(2, 4))
        drawn.append(torch.rand(()))
    assert drawn == drawn[:1] * 4


# In a pipeline.


def train(rank: int, world: int, layers: Any, pp: int, ep: int, replicas: int, schedule: str) -> tuple[Any, ...]:
    """Two steps: (losses, gradients, choices per layer and micro-batch, in training; choices in evaluation)."""
    pipe = Pipeline(
        layers,
        loss=token_loss,
        schedule=schedule,
        microbatches=MICROBATCHES,
        mesh=init_mesh(pp=pp, ep=ep, dp=replicas),
        expert_chunks=1,
    )
    mine = replica_batch(pipe.replica)
    results = [pipe.step(*mine) for _ in range(2)]
    rows = [counter.value.tolist() for result in results for counter in result.trace.counters if "rows" in counter.name]
    evaluated = pipe.gather_figures(pipe.evaluate(*mine))
    gradients = {name: weight.grad for name, weight in pipe.named_parameters() if weight.grad is not None}
    pipe.close()
    return [result.losses for result in results], gradients, rows, evaluated


def replica_batch(replica: int) -> tuple[Tensor, Tensor]:
    return batch(2 * MICROBATCHES, seed=5 + replica)


def plainly(skew: Skew) -> tuple[list[tuple[float, ...]], dict[str, Tensor]]:
    """Losses of two steps, and their gradients, of the unsplit model, of which each MoE is told where it stands."""
    layers = builders({"skew": skew})
    calls = dict.fromkeys(range(len(layers)), 0)

    def placed(number: int) -> nn.Module:
        layer = layers[number]()

        def tell(*_: Any) -> None:
            step, microbatch = divmod(calls[number], MICROBATCHES)
            calls[number] += 1
            torch.manual_seed(number)
            mark(number, Place(mix(0, step), mix(number, 1), 0, 0, [], step, microbatch))

        for part in layer.modules():
            if isinstance(part, MoE):
                part.register_forward_pre_hook(tell)
        return layer

    losses, gradients = plain_loop([partial(placed, n) for n in calls], [replica_batch(0)] * 2, MICROBATCHES)
    # The loop has taken the mean over both steps, which is half of their sum.
    return [tuple(losses[:MICROBATCHES]), tuple(losses[MICROBATCHES:])], {n: 2 * g for n, g in gradients.items()}


@pytest.mark.parametrize("skew", SKEWS, ids=str)
def test_gradients_are_those_of_the_plain_model_with_the_same_favourites(procs: Pool, skew: Skew):
    losses, gradients = plainly(skew)
    for pp in (1, 2):
        by_rank = procs.run(train, builders({"skew": skew}), pp, 1, 1, "zb-h1", world=pp)
        assert by_rank[0][0] == losses
        assert same({name: gradient for _, theirs, *_ in by_rank for name, gradient in theirs.items()}, gradients)


@pytest.mark.parametrize("skew", SKEWS, ids=str)
def test_members_of_an_expert_group_have_the_same_favourites_under_any_cut(procs: Pool, skew: Skew):
    layers = builders({"skew": skew})
    whole = procs.run(train, layers, 1, 1, 2, "1f1b", world=2)
    shared = procs.run(train, layers, 2, 2, 2, "zb-h1", world=4)
    for replica, theirs in enumerate(whole):
        mine = shared[replica::2]  # rank 0 and rank 1 of that replica, with a layer each
        found = [values for _, _, rows, _ in mine for values in rows]
        assert sorted(found) == sorted(theirs[2]), "choices of every micro-batch"
        for losses, gradients, _, evaluated in mine:
            assert losses == [pytest.approx(expected, rel=1e-6) for expected in theirs[0]]
            for name, gradient in gradients.items():
                expected = theirs[1][name]
                largest = max(expected.abs().max().item(), 1e-3)
                torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5 * largest)
            for layer, figures in evaluated.items():
                assert torch.equal(figures.sums["rows"], theirs[3][layer].sums["rows"]), "evaluated as trained"


class Wrapped(nn.Module):
    def __init__(self, skew: Skew, recomputed: bool):
        super().__init__()
        self.block, self.recomputed = expert_block(0, {"skew": skew, "jitter": 0.1}), recomputed

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)


def test_favourites_are_the_same_in_a_recomputation(procs: Pool):
    once, again = ([Embed, partial(Wrapped, SKEWS[2], recomputed), Head] for recomputed in (False, True))
    ((losses, gradients, *_),) = procs.run(train, once, 1, 1, 1, "1f1b", world=1)
    ((found, recomputed, *_),) = procs.run(train, again, 1, 1, 1, "1f1b", world=1)
    assert found == losses
    assert same(recomputed, gradients)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (("wild", 1.0), 'skew pattern = \'wild\' is none of "fixed", "drifting" and "bursty"'),
        (("fixed", 0.0), "skew strength = 0.0 is no number of logits above 0"),
        (("fixed", float("nan")), "skew strength = nan"),
    ],
)
def test_skews_that_are_none_are_refused(settings: Any, part: str):
    with pytest.raises(PipeSwiftError, match=part):
        Skew(*settings)
