"""The backward in two halves: exact, frees memory at I, and works for whatever a model does with its weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeswift.ir import F, I, Schedule, W
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.backward import attach
from pipeswift.runtime.engine import edge_of, run_backward
from pipeswift.runtime.footprint import Footprint
from pipeswift.runtime.ledger import Ledger
from pipeswift.runtime.pending import Pending, joined, weight_gradients
from pipeswift.runtime.rules import Rule
from pipeswift.schedules import build
from tests.procs import Pool
from tests.runtime.models import batch, builders, plain_loop, same, token_loss


class Product(nn.Module):
    """x @ weight, with a weight of any shape."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Keyword(Product):
    def __init__(self) -> None:
        super().__init__(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, other=self.weight)


class ToComplex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x.cos())


class ToReal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x)


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Bare(nn.Module):
    """A weight that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


LAYERS = {
    "linear": lambda: nn.Linear(16, 32),
    "linear without bias": lambda: nn.Linear(16, 32, bias=False),
    "linear used three times": lambda: thrice(nn.Linear(16, 16)),
    "frozen weight": lambda: freeze(nn.Linear(16, 32), "weight"),
    "frozen bias": lambda: freeze(nn.Linear(16, 32), "bias"),
    "product": lambda: Product(16, 8),
    "batch of products": lambda: Product(4, 16, 8),
    "attention": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    "convolution": lambda: nn.Conv1d(8, 16, 3, stride=2, padding=1),
    "grouped convolution": lambda: nn.Conv1d(8, 16, 3, groups=4, bias=False),
    "padding by name": lambda: nn.Conv1d(8, 16, 3, padding="same"),
    "transposed convolution": lambda: nn.ConvTranspose1d(8, 16, 3),
    "no rule": Bare,
    # W lost gradients of what a bias was computed from, and hooks on a weight saw None instead of its gradient.
    "computed bias": lambda: halve(nn.Linear(16, 16), "bias"),
    "hook on a weight": lambda: hooked(nn.Linear(16, 16)),
    # These rules forgot to conjugate, and knew neither broadcasting nor torch.matmul's own name for the weight.
    "complex product": lambda: nn.Sequential(ToComplex(), Product(16, 8, dtype=torch.complex64), ToReal()),
    "broadcast product": lambda: Product(1, 16, 8),
    "product by keyword": Keyword,
    "TorchScript": lambda: torch.jit.script(nn.Linear(16, 16)),  # was refused: it takes no hooks
    # W added its own sum to I's, which is not autograd's order.
    "transposed head": lambda: Tied(16, 16),
    "penalty on a gradient": lambda: Penalty(16, 16),
    # A gradient that is asked for within a backward was left for W.
    "gradient within a backward": lambda: Implicit(16, 16),
    # Crashed: what a rule made was a view, and a checkpoint of its own ran again without the rules.
    "changed in place": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16)),
    "own checkpoint": lambda: Own(16, 16),
    "own checkpoint, reentrant": lambda: Own(16, 16, use_reentrant=True),
    "rows that lie apart": lambda: Apart(),
    "rows that lie in columns": lambda: Columns(16, 16),
    "weight that goes in": lambda: Squared(16, 16),
    "weight that goes out": lambda: Added(16, 16),
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(use_reentrant=True),
    "under vmap": lambda: Mapped(16, 16),  # was refused: a function in two halves knows no transforms
    "unused parameter": lambda: unused(nn.Linear(16, 16)),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU()), backend="eager"),
    # The rules were compiled in part.
    "compiled under autocast": lambda: torch.compile(Scaled(16, 16), backend="eager"),
    "custom function": lambda: nn.Sequential(nn.Linear(16, 16), Doubled(), nn.Linear(16, 16)),
}


def thrice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


def freeze(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


def unused(layer: nn.Module) -> nn.Module:
    layer.spare = nn.Parameter(torch.ones(3))
    return layer


def halve(layer: nn.Module, name: str) -> nn.Module:
    return nn.utils.parametrize.register_parametrization(layer, name, Half())


def hooked(layer: nn.Linear) -> nn.Module:
    layer.weight.register_hook(lambda gradient: 3 * gradient)
    return layer


class Doubled(nn.Module):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return 2 * gradient

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x)


class Mapped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(super().forward)(x)


class Tied(nn.Linear):
    """Uses its weight three times, once in a way that no rule covers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).tanh() @ self.weight.t())


class Penalty(nn.Linear):
    """Adds the square of its own gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square()


class Tuned(nn.Linear):
    """Runs on weights that have made a step of their own."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).square().mean()
        steps = torch.autograd.grad(y, [self.weight, self.bias], create_graph=True)
        return nn.functional.linear(x, self.weight - steps[0], self.bias - steps[1])


class Implicit(nn.Linear):
    """Its backward differentiates it once more, as at a fixed point."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        leaf = y.detach().requires_grad_()
        again = super().forward(leaf.tanh())
        if y.requires_grad:
            y.register_hook(lambda g: g + torch.autograd.grad(again, leaf, g, retain_graph=True)[0])
        return y.tanh()


class Own(nn.Linear):
    """Checkpoints what it does with its own weights."""

    def __init__(self, *shape: int, use_reentrant: bool = False):
        super().__init__(*shape)
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self._use_reentrant)


class Scaled(nn.Linear):
    """Used twice under one autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(super().forward(x).tanh())
        return y.float() * self.bias


class Apart(nn.Module):
    """Linears on transposed rows, with transposed gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x.transpose(1, 2)).transpose(1, 2)).transpose(0, 1).sin()


class Columns(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1).t().contiguous().t())


class Squared(nn.Linear):
    """Its weight enters it, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ super().forward(self.weight)


class Added(nn.Linear):
    """Its weight goes out besides."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).tanh()) + self.weight.sum(0)


class Checkpointed(nn.Module):
    """Two linears whose activations are recomputed; counts its forwards."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.use_reentrant = use_reentrant
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inside, x, use_reentrant=self.use_reentrant)

    def _inside(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.inner(x)


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, 16, generator=generator) for _ in range(3)]


def fused(layer: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    layer(x).sin().sum().backward()
    return x.grad


class Halved:
    """A layer whose backward comes in two halves."""

    def __init__(self, layer: nn.Module):
        self.layer, self._ledger = layer, Ledger()
        attach(layer, self._ledger)

    def __call__(self, x: Tensor, step: int = 0) -> tuple[Tensor | None, list[Pending]]:
        """The I of sin(layer(x)).sum(): the gradient of x, and what is left for W."""
        x = x.clone().requires_grad_(x.is_floating_point())
        loss = self.layer(x).sin().sum()
        edge = edge_of(loss)
        with self._ledger.leaving(None, [edge], step) as pendings:
            run_backward((edge,), (torch.ones(()),))
        return x.grad, pendings


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether no element differs by more than 1e-5 of the largest of its parameter: float32, sums in another order."""
    return one.keys() == other.keys() and all(
        (one[name] - other[name]).abs().max() <= 1e-5 * other[name].abs().max() for name in one
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("delay", [0, 2])
def test_two_halves_give_the_bits_of_the_whole(name: str, delay: int):
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(LAYERS[name]())
    waiting: list[list[Pending]] = []
    halved = Halved(layers[1])
    for x in samples():
        gradient, pendings = halved(x)
        assert torch.equal(gradient, fused(layers[0], x))
        waiting.append(pendings)
        if len(waiting) > delay:
            weight_gradients(waiting.pop(0))
    for pendings in waiting:
        weight_gradients(pendings)
    one, other = ({n: p.grad for n, p in layer.named_parameters() if p.grad is not None} for layer in layers)
    assert same(one, other)


def test_a_layer_may_differentiate_by_its_weights():
    # What led from such a gradient back to the layer's input was lost.
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(Tuned(16, 16))
    gradient, pendings = Halved(layers[1])(samples()[0])
    weight_gradients(pendings)
    whole = fused(layers[0], samples()[0])
    one, other = ({n: p.grad for n, p in layer.named_parameters()} for layer in layers)
    assert close({**one, "x": whole}, {**other, "x": gradient})


def test_autocast_leaves_doubles_alone():
    # The split made them bfloat16, as it makes other numbers there; autocast does not.
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(nn.Linear(16, 16).double())
    x = samples()[0].double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradient, pendings = Halved(layers[1])(x)
        assert gradient is not None
        assert torch.equal(gradient, fused(layers[0], x))
        weight_gradients(pendings)
    assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)


def test_mixed_dtypes_are_refused_as_ever():
    # The split cast the weight in silence.
    with pytest.raises(RuntimeError, match="dtype"):
        Halved(nn.Linear(16, 16).double())(samples()[0])


@pytest.mark.parametrize(
    "embedding", [nn.Embedding(9, 16), nn.Embedding(9, 16, padding_idx=2), nn.Embedding(9, 4, sparse=True)]
)
def test_embeddings(embedding: nn.Embedding):
    tokens = torch.arange(24).reshape(4, 6) % 9
    embedding(tokens).sin().sum().backward()
    whole, embedding.weight.grad = embedding.weight.grad, None
    _, pendings = Halved(embedding)(tokens)
    assert len(pendings) == (not embedding.sparse)
    weight_gradients(pendings)
    assert torch.equal(embedding.weight.grad.to_dense(), whole.to_dense())


def test_a_weight_at_two_places_counts_once_each():
    # Case 17.1: loss = sum(x W W); counting the part upstream twice would give [[11, 7], [-1, 1]].
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0], [3.0, -1.0]]).T.contiguous()
    x = torch.tensor([[2.0, -1.0]], requires_grad=True)
    ledger = Ledger()
    attach(layer, ledger)
    y = layer(layer(x))
    edge = edge_of(y.sum())
    with ledger.leaving(None, [edge]) as pendings:
        run_backward((edge,), (torch.ones(()),))
    assert layer.weight.grad is None
    weight_gradients(pendings)
    assert layer.weight.grad.T.tolist() == [[5, 3], [2, 3]]
    assert x.grad.tolist() == [[7, 7]]


def test_a_use_without_a_gradient_does_not_lose_that_of_another():
    weight, x = nn.Parameter(torch.zeros(2)), torch.ones(2)
    some = Rule(torch.mul, torch.mul, lambda gradient, x, weight: (gradient * x,))
    none = Rule(torch.mul, torch.mul, lambda gradient, x, weight: (None,))
    weight_gradients([Pending(rule, x, x, (weight,), (None,), 0) for rule in (some, none)])
    assert weight.grad is not None
    assert torch.equal(weight.grad, x)


def test_a_weight_covered_in_part_leaves_nothing_for_w():
    layer = Tied(16, 16)
    _, pendings = Halved(layer)(samples()[0])
    assert {id(w) for pending in pendings for w in pending.parameters if w is not None} == {id(layer.bias)}


def test_a_weight_that_comes_to_be_covered_in_part_is_found_in_the_next_step():
    layer = Tied(16, 16)
    layer.weight.requires_grad_(False)
    halved = Halved(layer)
    halved(samples()[0])
    layer.weight.requires_grad_()
    _, pendings = halved(samples()[0], step=1)
    assert {id(w) for pending in pendings for w in pending.parameters if w is not None} == {id(layer.bias)}


def test_the_gradients_that_w_makes_are_those_it_accumulates():
    # Case 17.3.
    layer = nn.Linear(16, 16)
    _, (pending,) = Halved(layer)(samples()[0])
    weight, bias = pending.gradients()
    weight_gradients([pending])
    assert torch.equal(layer.weight.grad, weight)
    assert torch.equal(layer.bias.grad, bias)


class Twice(nn.Module):
    """Another layer's linear, used here too."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def test_layers_are_prepared_once():
    # Case 9.2: two chunks, two executors, and a module that three layers share, two of them in one chunk.
    linear = nn.Linear(16, 16)
    layers = [Twice(linear), Twice(linear), nn.Linear(16, 16), Twice(linear)]
    x = torch.cat(samples())
    pipe = Pipeline(layers, loss=lambda out, _: out.square().mean(), schedule="zb-v", microbatches=3)
    pipe.step(x, x)
    hooks = len(linear._forward_pre_hooks)
    assert hooks == len(pipe.stages) == 2
    pipe.step(x, x, microbatches=2)
    pipe.step(x, x)
    assert len(linear._forward_pre_hooks) == hooks
    gradients = {name: parameter.grad.clone() for name, parameter in pipe.named_parameters()}
    pipe.close()
    plain = nn.Sequential(*layers)
    plain.zero_grad()
    (3 * plain(x).square().mean()).backward()
    assert close(gradients, {name: parameter.grad for name, parameter in plain.named_parameters() if name in gradients})


def test_autocast_keeps_its_bits_too():
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))
    halved = Halved(layers[1])
    with torch.autocast("cpu", torch.bfloat16):
        for x in samples():
            one = fused(layers[0], x)
            other, pendings = halved(x)
            weight_gradients(pendings)
            assert torch.equal(one, other)
    assert same(*({n: p.grad for n, p in layer.named_parameters()} for layer in layers))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_happens_once_for_i_and_w_together(use_reentrant: bool):
    # Case 8.2: at most two forwards per micro-batch.
    layer = Checkpointed(use_reentrant)
    _, pendings = Halved(layer)(samples()[0])
    weight_gradients(pendings)
    assert layer.forwards == 2


def test_i_keeps_only_what_w_needs():
    # Two linears, since what enters the second one leads back to the graph.
    layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softmax(-1))
    with Footprint(layer.parameters()) as footprint:
        _, pendings = Halved(layer)(samples()[0])
    assert footprint.peak > footprint.bytes == 0
    kept = [tensor for pending in pendings for tensor in (pending.x, pending.gradient)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == 4
    assert not any(tensor.grad_fn for tensor in kept)
    weight_gradients(pendings)
    assert not any(parameter.grad.requires_grad for parameter in layer.parameters())


def delayed(ranks: int, microbatches: int, delay: int) -> Schedule:
    """GPipe whose W come `delay` micro-batches after their I."""

    def order(rank: int):
        yield from (F(rank, i) for i in range(microbatches))
        for i in range(microbatches + delay):
            if i < microbatches:
                yield I(rank, i)
            if i >= delay:
                yield W(rank, i - delay)

    return Schedule.one_route(order, ranks=ranks, microbatches=microbatches, name="delayed W")


BATCHED = {  # layer -> products that three micro-batches' W are
    "linear": 1,
    "linear used three times": 1,
    "frozen bias": 1,
    "product": 1,
    "batch of products": 1,
    "convolution": 3,  # has no form for it
    "attention": 2,  # the attention itself is one function of torch, with no form for W
}


@pytest.mark.parametrize("name", BATCHED)
def test_batched_w_is_one_product_within_its_tolerance(name: str):
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(LAYERS[name]())
    halved = Halved(layers[1])
    waiting: list[Pending] = []
    for x in samples():
        fused(layers[0], x)
        waiting += halved(x)[1]
    together = joined(waiting)
    assert len(together) == BATCHED[name]
    weight_gradients(together)
    assert close(*({n: p.grad for n, p in layer.named_parameters() if p.grad is not None} for layer in layers[::-1]))


def test_batched_w_takes_micro_batches_of_any_length():
    layers = [nn.Linear(16, 8), nn.Linear(16, 8)]
    layers[1].load_state_dict(layers[0].state_dict())
    halved = Halved(layers[1])
    waiting: list[Pending] = []
    for x in (samples()[0], samples()[1][:1], samples()[2][:, :5]):
        fused(layers[0], x)
        waiting += halved(x)[1]
    weight_gradients(joined(waiting))
    assert close(*(dict(weight=layer.weight.grad, bias=layer.bias.grad) for layer in layers[::-1]))


def train(rank: int, world: int, schedule: Schedule, batched: bool) -> dict[str, Tensor]:
    pipe = Pipeline(
        builders(6),
        loss=token_loss,
        schedule=schedule,
        mesh=init_mesh(pp=world),
        batched_weight_gradients=batched,
    )
    ready: list[int] = []
    pipe.on_grad_ready(lambda stage: ready.append(stage.index))
    pipe.step(*batch(8))
    pipe.close()
    assert sorted(ready) == sorted(pipe.stages)
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("delay", [0, 1, 4])
def test_delayed_weight_gradients_equal_the_plain_loop(procs: Pool, world: int, delay: int):
    # Case 17.4: one stage, and a first stage without input gradient, too.
    piped: dict[str, Tensor] = {}
    for part in procs.run(train, delayed(world, 4, delay), False, world=world):
        piped |= part
    assert same(piped, plain_loop(builders(6), *batch(8), 4)[1])


@pytest.mark.parametrize(("world", "schedule"), [(1, delayed(1, 4, 4)), (2, build("zb-h1", 2, 4))])
def test_batched_w_in_a_pipeline_is_within_its_tolerance(procs: Pool, world: int, schedule: Schedule):
    piped: dict[str, Tensor] = {}
    for part in procs.run(train, schedule, True, world=world):
        piped |= part
    plain = plain_loop(builders(6), *batch(8), 4)[1]
    assert close(piped, plain)
    assert not same(piped, plain), "nothing was batched"


@pytest.mark.parametrize(("name", "levels"), [("no rule", ["WARNING"]), ("linear", [])])
def test_what_no_rule_covers_is_said_once(name: str, levels: list[str], caplog: pytest.LogCaptureFixture):
    # Case 17.7: such a parameter falls back to I.
    caplog.set_level("INFO", logger="pipeswift")
    pipe = Pipeline([LAYERS[name]], loss=lambda out, _: out.sum(), schedule=delayed(1, 2, 1))
    for _ in range(2):
        pipe.step(torch.ones(2, 16), torch.ones(2, 16))
    pipe.close()
    assert [record.levelname for record in caplog.records] == levels
    assert all("100.0% of what it trains" in record.message for record in caplog.records)
