"""From measured layers to an unequal cut for ranks of unequal speed, and gradients that do not depend on it."""

from functools import partial

import torch

from pipeswift.plan.measure import measure
from pipeswift.plan.partition import Layers, Machine, layout
from pipeswift.rehearse.kernels import Emulated
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.schedules import build

LAYERS, WIDTH, MICROBATCHES = 9, 8, 4
SECONDS = 0.005
SPEEDS = (1.0, 2.0)


def mean(output, target):
    return output.mean()


def sample(samples):
    inputs = torch.linspace(0, 1, samples * WIDTH).reshape(samples, WIDTH)
    return inputs, inputs


def emulated(speed):
    seconds = SECONDS / speed
    return [partial(Emulated, WIDTH, F=seconds, I=seconds, W=seconds)] * LAYERS


def gradients(rank, world, cut):
    pipe = Pipeline(emulated(SPEEDS[rank]), loss=mean, microbatches=MICROBATCHES, mesh=init_mesh(pp=world), layout=cut)
    pipe.step(*sample(MICROBATCHES))
    pipe.close()
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


def test_the_faster_rank_gets_twice_the_layers(procs):
    profile = measure(emulated(1), loss=mean, sample=sample, sizes=[1], optimizer=None, seconds=0)
    cut = layout(Layers.profiled(profile), build("1f1b", 2, MICROBATCHES), Machine.of(2, speeds=SPEEDS))
    assert cut == (3, 6)

    slow, fast = procs.run(gradients, cut, world=2)
    (whole,) = procs.run(gradients, (LAYERS,), world=1)
    together = slow | fast
    assert len(slow) == 3
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[name], whole[name]) for name in whole)
