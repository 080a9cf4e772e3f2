"""What users bring to a pipeline: any boundary, shape, argument, tie, freeze and skip; each equals one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import pipeswift.nn
from pipeswift.errors import PipeSwiftError
from pipeswift.runtime import Pipeline, init_mesh
from tests.procs import CaseFailed, Pool
from tests.runtime.models import CLASSES, WIDTH, Block, Embed, Head, batch, builders, same, token_loss

Build = list[Callable[[], nn.Module]]


class Run(NamedTuple):
    """What to do with a model: settings of the pipeline, and a list of calls (method, arguments, keywords)."""

    model: Callable[[], Build]
    settings: dict[str, Any]
    calls: list[tuple[str, tuple, dict[str, Any]]]
    loss: Callable = token_loss


def execute(rank: int, world: int, run: Run) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses of each call, and the accumulated gradients of this rank."""
    settings = {"schedule": "1f1b", "microbatches": 2} | run.settings
    pipe = Pipeline(run.model(), loss=run.loss, mesh=init_mesh(pp=world), **settings)
    losses = [getattr(pipe, method)(*arguments, **keywords).losses for method, arguments, keywords in run.calls]
    gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    pipe.close()
    return losses, gradients


def equal_to_one_process(procs: Pool, run: Run, *worlds: int, exactly: bool = True) -> dict[str, Tensor]:
    """Runs on one rank and on each of `worlds`; results must be the same bits (or close, for sums over copies)."""
    ((losses, gradients),) = procs.run(execute, run, world=1)
    assert losses
    assert gradients
    for world in worlds:
        piped: dict[str, Tensor] = {}
        for theirs, part in procs.run(execute, run, world=world):
            assert theirs == losses
            piped |= part
        if exactly:
            assert same(piped, gradients), world
        else:
            for name, gradient in gradients.items():
                torch.testing.assert_close(piped[name], gradient)
    return gradients


def step(*arguments: Any, **keywords: Any) -> tuple[str, tuple, dict[str, Any]]:
    return "step", arguments, keywords


# Boundaries


@dataclass
class State:
    """A boundary value: floats with and without gradient, integers, flags, nothing."""

    h: Tensor
    extra: dict[str, Any]


class Open(Embed):
    """Tokens -> State with a float that needs a gradient, an int mask, a float table that needs none, and more."""

    def forward(self, tokens: Tensor) -> State:
        extra = {"mask": (tokens % 2).to(torch.int32), "table": torch.linspace(0, 1, WIDTH), "aux": None, "flag": True}
        return State(super().forward(tokens), extra)


class Through(Block):
    def forward(self, state: State) -> State:
        assert state.extra["flag"] is True
        assert state.extra["aux"] is None
        h = super().forward(state.h + state.extra["table"]) * (1 + state.extra["mask"].unsqueeze(-1))
        return State(h, state.extra)


class Close(Head):
    def forward(self, state: State) -> Tensor:
        return super().forward(state.h)


def state_model() -> Build:
    return [Open, *(lambda i=i: Through(i) for i in range(4)), Close]


def test_floats_ints_flags_and_nothing_cross_together(procs: Pool):
    # Cases 1.9, 1.12, 3.5, 3.6: exactly one gradient crosses each boundary.
    equal_to_one_process(procs, Run(state_model, {}, [step(*batch(4))]), 2, 3)


class Fork(Embed):
    """Tokens -> (h, side), of which the next layer uses `side` only for even micro-batches."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = super().forward(tokens)
        return h, h.sin()


class Join(Block):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        h, side = pair
        return super().forward(h + side if h.sum() > 0 else h)


def test_a_tensor_that_only_some_microbatches_use_gets_zeros(procs: Pool):
    # Case 2.9.
    run = Run(fork_and_join, {"microbatches": 4}, [step(*batch(8))])
    equal_to_one_process(procs, run, 3)


def fork_and_join() -> Build:
    return [Fork, lambda: Join(0), Head]


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


class View(nn.Module):
    """Hands on a transposed view, so that the next stage receives what was not contiguous here."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


def views_and_in_place() -> Build:
    return [Embed, InPlace, View, lambda: Block(0), InPlace, View, lambda: Block(1), InPlace, Head]


@pytest.mark.parametrize(("chunks", "schedule"), [(None, "1f1b"), (2, "interleaved-1f1b"), (None, "zb-h1")])
def test_views_and_layers_that_change_their_input(procs: Pool, chunks: int | None, schedule: str):
    equal_to_one_process(procs, Run(views_and_in_place, {"microbatches": 4}, [step(*batch(8))]), 3)
    settings = {"microbatches": 4, "schedule": schedule, "chunks": chunks}
    (_, gradients), *_ = procs.run(execute, Run(views_and_in_place, {"microbatches": 4}, [step(*batch(8))]), world=1)
    piped: dict[str, Tensor] = {}
    for _, part in procs.run(execute, Run(views_and_in_place, settings, [step(*batch(8))]), world=2):
        piped |= part
    assert same(piped, gradients)


class InPlaceAfterStatistics(nn.Module):
    """Counts its inputs, and then changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += 1
        return x.mul_(0.5)


def statistics(rank: int, world: int) -> list[float]:
    layers = [Embed, InPlaceAfterStatistics, Head]
    pipe = Pipeline(layers, loss=token_loss, microbatches=4, layout=[1, 2], mesh=init_mesh(pp=world))
    pipe.step(*batch(8))
    pipe.close()
    return [buffer.item() for stage in pipe.stages.values() for layer in stage.layers() for buffer in layer.buffers()]


def test_a_layer_that_changes_its_input_runs_once_per_micro_batch(procs: Pool):
    # Autograd refused the first forward half-way, and a second one counted once more.
    assert procs.run(statistics, world=2) == [[], [4.0]]


# Shapes


def test_lengths_may_change_between_steps_and_within_one(procs: Pool):
    # Cases 2.2 (5 then 6), 2.3 (3 and 7 in one step), 2.4 and 2.6: labels follow their micro-batch.
    ready_made = [list(part) for part in zip(batch(2, 3), batch(2, 7), strict=True)]
    calls = [step(*batch(4, 5)), step(*batch(4, 6)), step(*ready_made), step(*batch(4, 5))]
    equal_to_one_process(procs, Run(model_of_5, {}, calls), 2, 3)


def model_of_5() -> Build:
    return builders(5)


def test_a_batch_that_does_not_divide(procs: Pool):
    # Case 2.1: sizes 3, 3, 2, weighted by their samples.
    gradients = equal_to_one_process(procs, Run(model_of_5, {"microbatches": 3}, [step(*batch(8))]), 2, 3)
    model = nn.Sequential(*(build() for build in builders(5)))
    token_loss(model(batch(8)[0]), batch(8)[1]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_last_batch_with_fewer_samples_than_microbatches(procs: Pool):
    calls = [step(*batch(8)), step(*batch(3), microbatches=3)]
    equal_to_one_process(procs, Run(model_of_5, {"microbatches": 4}, calls), 2)


def test_training_and_evaluation_take_turns(procs: Pool):
    # Cases 14.1, 14.2: any order, other sizes and counts.
    evaluate = ("evaluate", batch(8), {"microbatches": 8})
    calls = [
        ("evaluate", batch(2), {}),
        step(*batch(4)),
        evaluate,
        step(*batch(4)),
        ("evaluate", batch(5, 9), {"microbatches": 5}),
    ]
    equal_to_one_process(procs, Run(model_of_5, {}, calls), 2, 3)


class Ragged(nn.Module):
    """An output whose shape depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : 1 + int(x[0, 0])]


def ragged() -> Build:
    return [Ragged, Embed, lambda: Block(0), Head]


def ragged_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.square().mean()


class Kinds(Block):
    """What it hands on depends on the length: other containers, plain values, and tensors of no elements."""

    def forward(self, value: Any) -> Any:
        h = super().forward(of_kinds(value))
        kinds = {
            5: {"h": h, "nothing": h[:, :0], "numbers": torch.arange(7)},
            6: {"h": h, "flags": torch.tensor([True, False]), "length": 6},
        }
        return kinds.get(h.shape[1], h)


class KindsHead(Head):
    def forward(self, value: Any) -> Tensor:
        return super().forward(of_kinds(value))


def of_kinds(value: Any) -> Tensor:
    return value["h"] if isinstance(value, dict) else value


def model_of_kinds() -> Build:
    return [Embed, lambda: Kinds(0), lambda: Kinds(1), KindsHead]


@pytest.mark.parametrize("model", [model_of_5, model_of_kinds])
def test_steps_may_look_unlike_those_before_them(procs: Pool, model: Callable[[], Build]):
    # After two steps that look alike, the next is received before it is announced: here it looks otherwise half of the
    # time, with shapes that are new, known, or of another number of micro-batches, and evaluations among them.
    ready_made = [list(part) for part in zip(batch(2, 3), batch(2, 7), strict=True)]
    kinds = [step(*batch(4, 5)), step(*batch(4, 6)), step(*ready_made), step(*batch(6, 5), microbatches=3)]
    kinds += [("evaluate", batch(4, 5), {}), ("evaluate", batch(5, 9), {"microbatches": 5})]
    pick = Random(0)
    calls = [call for _ in range(25) for call in [pick.choice(kinds)] * pick.choice((1, 2, 3))]
    equal_to_one_process(procs, Run(model, {}, calls), 2, 3)


def test_shapes_that_depend_on_data_need_a_word(procs: Pool):
    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    run = Run(ragged, {"dynamic_shapes": True}, [step(tokens, tokens)], ragged_loss)
    equal_to_one_process(procs, run, 2)
    with pytest.raises(AssertionError, match="dynamic_shapes=True"):
        procs.run(execute, run._replace(settings={}), world=2)


# Arguments


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor, *, positions: Tensor | None = None, factor: float = 1.0) -> Tensor:
        assert mask.shape[0] == x.shape[0]
        if positions is not None:
            assert positions.shape == (3, *x.shape[:2])
            x = x + positions.sum(0).unsqueeze(-1)
        return super().forward(x * mask.unsqueeze(-1)) * factor


def masked() -> Build:
    return [Embed, lambda: Masked(0), lambda: Block(1), lambda: Masked(2), Head]


def test_every_stage_gets_the_arguments_that_it_names(procs: Pool):
    # Cases 3.1 (mask rows follow their micro-batch), 3.3 (a [3, batch, length] tensor is cut along dimension 1).
    x, y = batch(4)
    mask = torch.arange(12.0).reshape(4, 3)
    positions = torch.arange(36.0).reshape(3, 4, 3) / 36
    run = Run(masked, {"split": {"positions": 1}}, [step(x, y, mask=mask, positions=positions, factor=0.5)])
    gradients = equal_to_one_process(procs, run, 2, 3)
    layers = [build() for build in masked()]
    for i in range(2):
        rows = slice(2 * i, 2 * i + 2)
        h = layers[0](x[rows])
        h = layers[1](h, mask[rows], positions=positions[:, rows], factor=0.5)
        h = layers[3](layers[2](h), mask[rows], positions=positions[:, rows], factor=0.5)
        (token_loss(layers[4](h), y[rows]) / 2).backward()
    plain = {f"{i}.{name}": p.grad for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    assert same(gradients, plain)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"maks": torch.ones(4, 3)}, "'maks'.*factor, mask, positions"),
        ({"mask": torch.ones(3, 4)}, "dimension 0.*split="),
        ({"mask": [torch.ones(2, 3)]}, "list of 1 micro-batches"),
        ({"mask": torch.tensor(1.0)}, "split="),
    ],
)
def test_arguments_are_never_cut_by_guess(arguments: dict[str, Any], says: str):
    pipe = Pipeline(masked(), loss=token_loss, microbatches=2)
    with pytest.raises(PipeSwiftError, match=says):
        pipe.step(*batch(4), **arguments)


# Tied, frozen, without parameters


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(CLASSES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def tied() -> Build:
    return [Embed, lambda: Block(0), lambda: Block(1), TiedHead]


def train_tied(rank: int, world: int, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], bool]:
    settings = {"schedule": "1f1b", "microbatches": 4, "tie": [("0.weight", "3.weight")]} | settings
    pipe = Pipeline(tied(), loss=token_loss, mesh=init_mesh(pp=world), **settings)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.5)
    norms = []
    for seed in range(3):
        pipe.step(*batch(8, seed=seed))
        pipe.step(*batch(8, seed=seed + 10))
        norms.append(optimizer.step(clip_norm=1.0))
    modules = {segment.numbers[0]: segment.layers for stage in pipe.stages.values() for segment in stage.segments}
    layers = [layer for _, group in sorted(modules.items()) for layer in group]
    one_tensor = len(layers) == 4 and layers[0].weight is layers[3].weight
    pipe.close()
    return norms, {name: p.detach() for name, p in pipe.named_parameters()}, one_tensor


def test_tied_weights_stay_equal_and_equal_one_process(procs: Pool):
    # Case 4.1. The sum over the two copies adds in another order than one process does: to 1e-6 of the value.
    ((norms, weights, one_tensor),) = procs.run(train_tied, {}, world=1)
    assert one_tensor
    assert "3.weight" not in weights, "a tied weight is counted once"
    for world in (2, 4):
        by_rank = procs.run(train_tied, {}, world=world)
        first, last = by_rank[0][1]["0.weight"], by_rank[-1][1]["3.weight"]
        assert torch.equal(first, last)
        torch.testing.assert_close(first, weights["0.weight"], rtol=1e-5, atol=1e-6)
        assert by_rank[0][0] == by_rank[-1][0]
        assert by_rank[0][0] == pytest.approx(norms, rel=1e-5)


def meta_model() -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        )
        model[2].weight = model[0].weight
    return model


def test_ties_are_found_in_modules_through_meta_construction_too(procs: Pool):
    ((losses, gradients),) = procs.run(execute, Run(meta_model, {}, [step(*batch(4))]), world=1)
    assert set(gradients) == {"0.weight", "1.weight", "1.bias"}
    by_rank = procs.run(execute, Run(meta_model, {}, [step(*batch(4))]), world=3)
    assert by_rank[0][0] == losses
    assert torch.equal(by_rank[0][1]["0.weight"], by_rank[2][1]["2.weight"])
    torch.testing.assert_close(by_rank[0][1]["0.weight"], gradients["0.weight"], rtol=1e-5, atol=1e-6)


def frozen(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().requires_grad_(False)


def frozen_front() -> Build:
    return [frozen(Embed), frozen(lambda: Block(0)), lambda: Block(1), frozen(lambda: Block(2)), Head]


def frozen_tied() -> Build:
    return [frozen(Embed), lambda: Block(0), frozen(TiedHead)]


def test_frozen_layers_pass_gradients_or_none(procs: Pool):
    gradients = equal_to_one_process(procs, Run(frozen_front, {}, [step(*batch(4))]), 2, 3)
    assert {name.partition(".")[0] for name in gradients} == {"2", "4"}


def test_a_frozen_tie_has_no_gradient_to_sum(procs: Pool):
    # Case 4.3.
    equal_to_one_process(procs, Run(frozen_tied, {"tie": [("0.weight", "2.weight")]}, [step(*batch(4))]), 2, 3)


def without_parameters() -> Build:
    return [Embed, nn.Tanh, lambda: Block(0), nn.Tanh, Head]


def test_stages_without_parameters(procs: Pool):
    # Case 5.7: one layer per stage, one of them pure activation.
    equal_to_one_process(procs, Run(without_parameters, {"microbatches": 5}, [step(*batch(5))]), 5)


@pytest.mark.parametrize(
    ("tie", "says"),
    [
        ([("0.weight",)], "at least two"),
        ([("0.weight", "9.weight")], "0 to 3"),
        ([("0.weight", "3.wait")], "'3.wait' does not exist.*3.weight"),
        ([("0.weight", "1.up.weight")], "one shape"),
    ],
)
def test_bad_ties_are_named(tie: list, says: str):
    with pytest.raises(PipeSwiftError, match=says):
        Pipeline(tied(), loss=token_loss, microbatches=2, tie=tie)


# Skips, dropout


class Add(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def unet() -> Build:
    """A skip from the first stage to the last but one, over the stages between."""
    stash, pop = (lambda: pipeswift.nn.Stash("x")), (lambda: pipeswift.nn.Pop("x"))
    return [Embed, stash, lambda: Block(0), lambda: Block(1), lambda: Block(2), pop, Add, Head]


def test_a_skip_over_stages(procs: Pool):
    # Case 3.9.
    gradients = equal_to_one_process(procs, Run(unet, {}, [step(*batch(4))]), 2, 3, 4)
    layers = [build() for build in unet()]
    for i in range(2):
        x, y = (part[2 * i : 2 * i + 2] for part in batch(4))
        h = skip = layers[0](x)
        for layer in layers[2:5]:
            h = layer(h)
        (token_loss(layers[7](h + skip), y) / 2).backward()
    plain = {f"{i}.{name}": p.grad for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    assert same(gradients, plain)


def dropped() -> Build:
    return [Embed, lambda: Block(0), lambda: pipeswift.nn.Dropout(0.4), lambda: Block(1), Head]


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
def test_keyed_dropout_is_independent_of_the_microbatches(procs: Pool, m: int):
    # Case 13.1, and more: independent of m too, where batches do not divide as well.
    run = Run(dropped, {"microbatches": m}, [step(*batch(8))])
    gradients = equal_to_one_process(procs, run, 2, 5)
    ((_, whole),) = procs.run(execute, run._replace(settings={"microbatches": 1}), world=1)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[name])


class TwiceDropped(nn.Module):
    """A block that drops twice, and that checkpointing may run again."""

    def __init__(self, index: int, checkpointed: bool):
        super().__init__()
        self.block, self.checkpointed = Block(index), checkpointed
        self.one, self.two = pipeswift.nn.Dropout(0.4), pipeswift.nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inside, x, use_reentrant=False) if self.checkpointed else self._inside(x)

    def _inside(self, x: Tensor) -> Tensor:
        return self.two(self.block(self.one(x)))


def twice_dropped(checkpointed: bool) -> Build:
    return [Embed, *(lambda i=i: TwiceDropped(i, checkpointed) for i in range(3)), Head]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_keyed_dropout_draws_the_same_when_a_forward_is_run_again(procs: Pool, schedule: str):
    # A recomputation used to find the place in the batch of whatever forward had run last.
    gradients = []
    for checkpointed in (False, True):
        settings = {"microbatches": 4, "schedule": schedule}
        run = Run(partial(twice_dropped, checkpointed), settings, [step(*batch(8))])
        gradients.append(equal_to_one_process(procs, run, 3))
    assert same(*gradients)


def test_two_draws_of_a_pass_differ():
    pipe = Pipeline([lambda: nn.Sequential(Keep(), Keep())], loss=lambda out, _: out.sum(), microbatches=1)
    (output,) = pipe.step(torch.ones(4, 50), torch.ones(4, 50), outputs="all").outputs
    pipe.close()
    kept = (output != 0).float().mean().item()
    assert kept < 0.4, "with one mask for both, half of the elements would be left"


class Keep(pipeswift.nn.Dropout):
    """Half of the elements."""


# Results


def results(rank: int, world: int) -> dict[str, Any]:
    pipe = Pipeline(builders(4), loss=token_loss, microbatches=4, mesh=init_mesh(pp=world))
    everywhere = pipe.evaluate(*batch(8), outputs="all")
    last = pipe.step(*batch(8), outputs="last", losses="last")
    without_loss = pipe.evaluate(batch(8)[0], outputs="last")
    pipe.close()
    return {
        "loss": everywhere.loss,
        "outputs": torch.cat(everywhere.outputs),
        "last loss": last.loss,
        "last outputs": last.outputs is not None,
        "without loss": (without_loss.loss, without_loss.outputs is not None),
    }


def test_losses_and_outputs_where_they_are_asked_for(procs: Pool):
    # Cases 15.1, 15.3: never a made-up number.
    by_rank = procs.run(results, world=3)
    model = nn.Sequential(*(build() for build in builders(4)))
    x, y = batch(8)
    for rank, got in enumerate(by_rank):
        torch.testing.assert_close(got["outputs"], model(x).detach())
        assert got["loss"] == pytest.approx(cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
        assert (got["last loss"] is not None, got["last outputs"]) == (rank == 2, rank == 2)
        assert got["without loss"] == (None, rank == 2)


class Infinite(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.inf


def overflow(rank: int, world: int, nonfinite: str) -> tuple[str, bool]:
    pipe = Pipeline([Embed, lambda: Block(0), Infinite], loss=token_loss, microbatches=2, mesh=init_mesh(pp=world))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1.0)
    before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    pipe.step(*batch(4))
    try:
        said = str(optimizer.step(clip_norm=1.0, nonfinite=nonfinite))
    except PipeSwiftError as error:
        said = str(error)
    pipe.close()
    return said, same(before, {name: p.detach() for name, p in pipe.named_parameters()})


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_all_ranks_agree_on_a_gradient_that_is_not_finite(procs: Pool, nonfinite: str):
    # Case 7.1.
    by_rank = procs.run(overflow, nonfinite, world=3)
    assert len({said for said, _ in by_rank}) == 1
    assert "nan" in by_rank[0][0]
    assert all(unchanged for _, unchanged in by_rank)


# Regressions


class Counted(Embed):
    """Hands on a buffer that it changes in place for every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(10_000))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        return super().forward(x), self.seen


class Scaled(Block):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(both[0]) * both[1][-1]


def counted() -> Build:
    return [Counted, lambda: Scaled(0), Head]


def test_a_buffer_crosses_as_it_was(procs: Pool):
    # The buffer was sent without a copy, and later micro-batches changed it before it had left.
    calls = [("evaluate", batch(8), {"microbatches": 8}), step(*batch(8), microbatches=1)]
    equal_to_one_process(procs, Run(counted, {}, calls), 2, 3)


class Conjugate(Embed):
    """Hands on lazy views: a conjugate, and a negative."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = super().forward(x)
        conjugate = torch.complex(rows, rows.sin()).conj()
        return conjugate, conjugate.imag


class Unite(Block):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(both[0].real + both[0].imag * both[1])


def conjugates() -> Build:
    return [Conjugate, lambda: Unite(0), Head]


def test_lazy_conjugates_and_negatives_cross(procs: Pool):
    # Only the memory crossed, without the flags that say how to read it.
    equal_to_one_process(procs, Run(conjugates, {"microbatches": 2}, [step(*batch(4))]), 2, 3)


class Positive(nn.ReLU):
    def __init__(self) -> None:
        super().__init__(inplace=True)


def first_in_place() -> Build:
    return [Positive, *(partial(Block, i) for i in range(3)), Head]


def test_a_first_layer_may_change_its_input_in_place(procs: Pool):
    # Micro-batches are views of one tensor and shared its version: a change to one counted as a change to all.
    inputs = torch.randn(8, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    equal_to_one_process(procs, Run(first_in_place, {"microbatches": 4}, [step(inputs, batch(8)[1])]), 2, 3)


def overlapping(rank: int, world: int) -> dict[str, Tensor]:
    layers = [Embed, *(partial(nn.Linear, WIDTH, WIDTH) for _ in range(3)), Head]
    ties = [("1.weight", "3.weight"), ("1.weight", "2.weight")]
    pipe = Pipeline(layers, loss=token_loss, microbatches=2, mesh=init_mesh(pp=world), tie=ties)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(*batch(4))
    optimizer.step()
    pipe.close()
    return {name: p.detach() for name, p in pipe.named_parameters() if name[0] in "123" and "weight" in name}


def test_ties_that_share_a_name_are_one(procs: Pool):
    # Each was summed on its own, and the copies drifted apart.
    copies = [weight for part in procs.run(overlapping, world=3) for weight in part.values()]
    assert len(copies) > 1
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def unlike_ties(rank: int, world: int, other: Callable[[], nn.Module]) -> str:
    layers = [lambda: nn.Linear(4, 4), other]
    with pytest.raises(PipeSwiftError) as caught:
        Pipeline(layers, loss=token_loss, microbatches=2, mesh=init_mesh(pp=world), tie=[("0.weight", "1.weight")])
    return str(caught.value)


def frozen_linear() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize(
    "other", [partial(nn.Linear, 4, 5), partial(nn.Linear, 4, 4, dtype=torch.float64), frozen_linear]
)
def test_unlike_ties_across_ranks_are_refused_on_all(procs: Pool, other: Callable[[], nn.Module]):
    # They crashed the transport or, where only one is trained, hung.
    says = procs.run(unlike_ties, other, world=2)
    assert says[0] == says[1]
    assert "0.weight and 1.weight are [4, 4] float32, trained and" in says[0]


def test_parts_kept_in_evaluation_mode_stay_in_it():
    # An evaluation put every part of a layer back into training mode.
    layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), nn.Linear(4, 4))
    pipe = Pipeline(layers, loss=nn.functional.mse_loss, microbatches=1)
    layers[0][1].eval()
    samples = torch.randn(2, 4)
    pipe.step(samples, samples)
    pipe.evaluate(samples, samples)
    pipe.step(samples, samples)
    assert [part.training for part in layers.modules()] == [True, True, True, False, True]


def no_gradient(output: Tensor, targets: Tensor) -> Tensor:
    return token_loss(output.detach(), targets)


def in_turns(output: Tensor, targets: Tensor) -> Any:
    mean = token_loss(output, targets)
    return mean if targets[0, 0] == batch(4)[1][0, 0] else (mean, 1)


BAD_CALLS = [
    ({"loss": lambda output, _: (output.sum(), None)}, {}, "count = None"),
    ({"loss": lambda output, _: (output.sum(), -1)}, {}, "count = -1"),
    ({"loss": lambda output, _: (output.sum(), 1, 2)}, {}, "loss returned tuple"),
    ({"loss": lambda output, _: output.mean() * 1j}, {}, "complex64"),
    ({"loss": no_gradient}, {}, "without gradient"),  # nothing was trained, in silence
    ({"loss": in_turns}, {}, "return the same for all"),
    ({"loss": None}, {}, "loss = None is no function"),
    ({}, {"scale": 0}, "scale = 0"),
    ({}, {"outputs": "first"}, "outputs = 'first'"),
    ({}, {"losses": "first"}, "losses = 'first'"),
    ({}, {"microbatches": 0}, "microbatches = 0"),
    ({}, {"targets": [torch.zeros(0, 3, dtype=torch.int64)] * 4}, "0 samples"),
    ({}, {"targets": [torch.tensor(1)] * 4}, "without dimensions"),
]


@pytest.mark.parametrize(("settings", "call", "says"), BAD_CALLS)
def test_bad_calls_are_named(settings: dict[str, Any], call: dict[str, Any], says: str):
    inputs, targets = batch(4)
    every: dict[str, Any] = {"loss": token_loss, "microbatches": 4} | settings
    pipe = Pipeline(builders(3), **every)
    with pytest.raises(PipeSwiftError, match=says):
        pipe.step(inputs, call.pop("targets", targets), **call)


def test_a_step_needs_gradients_and_an_open_pipeline():
    pipe = Pipeline(builders(3), loss=token_loss, microbatches=2)
    with torch.no_grad(), pytest.raises(PipeSwiftError, match="no_grad"):
        pipe.step(*batch(4))
    with pytest.raises(PipeSwiftError, match="clip_norm = -1"):
        pipe.optimizer(torch.optim.SGD, lr=0.1).step(clip_norm=-1)
    pipe.close()
    with pytest.raises(PipeSwiftError, match="closed"):  # on several ranks it hung
        pipe.evaluate(*batch(4))


@pytest.mark.parametrize("setting", ["microbatches", "chunks", "seed", "layout", "schedule"])
def test_settings_of_the_wrong_kind_are_named(setting: str):
    settings: dict[str, Any] = {"microbatches": 2, setting: 2.5}
    with pytest.raises(PipeSwiftError, match=f"{setting} = 2.5 is no"):
        Pipeline(builders(3), loss=token_loss, **settings)


@pytest.mark.parametrize("value", ["unpicklable", "incomparable", "factory"])
def test_plain_values_that_cannot_cross_are_named(procs: Pool, value: str):
    with pytest.raises(CaseFailed, match=r"PipeSwiftError: .*(cannot cross|cannot be compared|cannot be made again)"):
        procs.run(odd_value, value, world=2)


def odd_value(rank: int, world: int, value: str) -> None:
    def odd(x: Tensor) -> Any:
        if value == "factory":
            return defaultdict(list, x=x)
        return x, (lambda: 1) if value == "unpicklable" else np.ones(3)

    layer = Embed()
    layer.register_forward_hook(lambda *arguments: odd(arguments[-1]))
    layers = [layer, Scaled(0), Head()]
    mesh = init_mesh(pp=world)
    Pipeline(layers, loss=token_loss, microbatches=2, mesh=mesh, layout=[1, 2], watchdog=None).step(*batch(4))
