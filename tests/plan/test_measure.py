"""Profiles of layers: counted by hand where they are estimated, never too short where they are measured."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from pipeswift.plan.measure import estimate, measure
from pipeswift.plan.profile import ProfileError
from pipeswift.rehearse.kernels import Emulated
from pipeswift.train.model import builders, next_byte_loss

FLOAT = 4  # bytes
linear = partial(nn.Linear, bias=False)


def mean(output, target):
    return output.mean()


def rows(width):
    return lambda samples: (torch.randn(samples, width), torch.zeros(samples))


def bytes_of_text(samples):
    return torch.randint(256, (2, samples, 16))


def test_estimated_seconds_are_flops_over_their_rate():
    layers = [partial(linear, 8, 16), nn.Identity(), partial(linear, 16, 32)]
    profile = estimate(layers, loss=mean, sample=rows(8), sizes=[3, 6], flops=2, bandwidth=float("inf"))
    F, I, W, B = profile.seconds(3).tolist()  # noqa: E741
    assert F == W == [3 * 8 * 16, 0, 3 * 16 * 32]
    assert I == [0, 0, 3 * 16 * 32]  # nobody asks for the gradient of the model's input
    assert [i + w for i, w in zip(I, W, strict=True)] == B
    assert profile.seconds(6).tolist() == (2 * profile.seconds(3)).tolist()


def test_estimated_seconds_are_bytes_over_their_rate():
    profile = estimate([nn.ReLU(), nn.ReLU()], loss=mean, sample=rows(8), sizes=[1], flops=1e30, bandwidth=FLOAT)
    assert profile.seconds()[0, 0] == 8 + 8  # reads and writes one row


def test_views_are_free():
    # Questions of a tensor for its device were charged for its bytes.
    layers = [nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.ReLU()]
    profile = estimate(layers, loss=mean, sample=rows(8), sizes=[1], flops=1e30, bandwidth=FLOAT)
    assert profile.seconds()[0, 1] == 0


def test_bytes_are_those_of_tensors():
    profile = estimate(
        [partial(linear, 8, 16), nn.Tanh(), linear(16, 4)], loss=mean, sample=rows(8), sizes=[2], **RATES
    )
    assert profile.output_bytes()[:2].tolist() == [2 * 16 * FLOAT, 2 * 16 * FLOAT]
    assert profile.saved_bytes().tolist() == [0, 2 * 16 * FLOAT, 2 * 16 * FLOAT]  # the batch is there anyway
    assert profile.parameter_bytes.tolist() == [8 * 16 * FLOAT, 0, 16 * 4 * FLOAT]
    step = 4  # AdamW counts the steps of every parameter
    assert profile.optimizer_bytes.tolist() == [2 * 8 * 16 * FLOAT + step, 0, 2 * 16 * 4 * FLOAT + step]


RATES = {"flops": 1e12, "bandwidth": 1e11}


def test_what_is_estimated_and_what_is_measured_take_the_same_bytes():
    how = {"loss": next_byte_loss, "sample": bytes_of_text, "sizes": [1, 2]}
    layers = builders(blocks=2, width=32, heads=2, context=16)
    estimated = json.loads(estimate(layers, **how, **RATES).to_json())
    measured = json.loads(measure(layers, **how, seconds=0).to_json())
    for one, other in zip(estimated["layers"], measured["layers"], strict=True):
        for document in (one, other):
            for op in "FIWB":
                del document[op]
        assert one == other


def test_measured_passes_take_at_least_what_they_take():
    layers = [partial(Emulated, 8, F=0.01, I=0.02, W=0.03), partial(Emulated, 8, F=0.02, I=0.01, W=0.01)]
    profile = measure(layers, loss=mean, sample=rows(8), sizes=[1], optimizer=None, seconds=0)
    assert (profile.seconds() >= [[0.01, 0.02], [0.02, 0.01], [0.03, 0.01], [0.05, 0.02]]).all()
    assert profile.optimizer_bytes.tolist() == [0, 0]


def test_layers_of_one_builder_share_their_figures():
    block = partial(linear, 8, 8)
    profile = measure([linear(8, 8), block, block, nn.Tanh()], loss=mean, sample=rows(8), sizes=[1], seconds=0)
    assert profile.layers[1] == profile.layers[2]


def test_the_callers_modules_stay_as_they_were():
    module, virgin = linear(8, 8), nn.Linear(8, 8, device="meta")
    before = module.weight.clone()
    measure([module, virgin], loss=mean, sample=rows(8), sizes=[1], seconds=0)
    assert module.weight.grad is None
    assert torch.equal(module.weight, before)
    assert not module._forward_hooks
    assert virgin.weight.is_meta


class Picky(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_layer_that_asks_for_values_cannot_be_estimated():
    with pytest.raises(ProfileError, match="depends on values"):
        estimate([Picky()], loss=mean, sample=rows(8), sizes=[1], **RATES)


@pytest.mark.parametrize("rates", [{"flops": 0.0, "bandwidth": 1.0}, {"flops": 1.0, "bandwidth": float("nan")}])
def test_rates_are_above_zero(rates):
    with pytest.raises(ProfileError, match="is no rate"):
        estimate([nn.Tanh()], loss=mean, sample=rows(8), sizes=[1], **rates)
