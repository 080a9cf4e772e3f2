"""The trainer's model as something to profile: its layers, its loss, and text to run them on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeswift.plan import measure
from pipeswift.plan.profile import Profile
from pipeswift.train.config import Config, Model
from pipeswift.train.data import BYTES
from pipeswift.train.model import builders, next_byte_loss


def measured(config: Config, sizes: Sequence[int], **how: Any) -> Profile:
    """The layers' costs here, with the threads of a rank; how: see `plan.measure.measure`."""
    torch.set_num_threads(config.pipeline.threads)
    return measure.measure(seed=config.train.seed, **_subject(config.model, sizes), **how)


def estimated(config: Config, sizes: Sequence[int], *, flops: float, bandwidth: float) -> Profile:
    """The layers' costs on a machine of these rates: floating point operations and bytes of memory per second."""
    return measure.estimate(flops=flops, bandwidth=bandwidth, **_subject(config.model, sizes))


def _subject(model: Model, sizes: Sequence[int]) -> dict[str, Any]:
    return {
        "layers": builders(**model.shape),
        "loss": next_byte_loss,
        "sample": partial(_noise, model.context),
        "sizes": sizes,
    }


def _noise(context: int, samples: int) -> tuple[Tensor, Tensor]:
    """Text of random bytes: inputs and targets, (samples, context)."""
    return torch.randint(BYTES, (samples, context)), torch.randint(BYTES, (samples, context))
