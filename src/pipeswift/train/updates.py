"""How a step of the trainer changes the weights: at its end, or, without flush, many times on its way."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch

from pipeswift.runtime import Pipeline, Result, Update
from pipeswift.train.config import Config, Train
from pipeswift.train.rate import corrected, learning_rate

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets


class Taken(NamedTuple):
    """A step that was taken. rate, norm: of its update, or of its last update and the mean over all of them."""

    results: Sequence[Result]
    rate: float
    norm: float


class Updates(Protocol):
    def step(self, index: int, batches: Sequence[Batch]) -> Taken:
        """Step number `index` of the run, over these mini-batches. Every rank must call this."""
        ...


def updates_of(pipe: Pipeline, config: Config) -> Updates:
    """The way that suits the pipeline's schedule."""
    return AtTheEnd(pipe, config) if pipe.schedule.flush else OnTheWay(pipe, config)


class AtTheEnd:
    """One optimizer step, clipped by the norm over the whole model, behind all flushes of a step."""

    def __init__(self, pipe: Pipeline, config: Config):
        self._pipe, self._settings = pipe, config.train
        self._optimizer = pipe.optimizer(torch.optim.AdamW, **_adamw(config.train))

    def step(self, index: int, batches: Sequence[Batch]) -> Taken:
        settings = self._settings
        rate = _scheduled(index, settings, per_step=1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        results = [self._pipe.step(*batch, scale=1 / len(batches)) for batch in batches]
        return Taken(results, rate, self._optimizer.step(clip_norm=settings.clip_norm))


class OnTheWay:
    """Updates inside the step, each clipped by its stage's norm alone, at a rate that heeds its staleness."""

    def __init__(self, pipe: Pipeline, config: Config):
        self._pipe, self._settings = pipe, config.train
        self._per_step = config.train.microbatches // (config.pipeline.updates_every or 1)
        self._rate = 0.0
        self._optimizer = pipe.async_optimizer(
            torch.optim.AdamW, clip_norm=config.train.clip_norm, rate=self._rate_of, **_adamw(config.train)
        )

    def step(self, index: int, batches: Sequence[Batch]) -> Taken:
        results = [self._pipe.step(*batch) for batch in batches]
        return Taken(results, self._rate, fmean(self._optimizer.gradient_norms()))

    def _rate_of(self, update: Update) -> float:
        settings = self._settings
        rate = _scheduled(update.number, settings, self._per_step)
        done = update.number / self._per_step
        self._rate = corrected(rate, update.staleness, done, over=settings.staleness_correction)
        return self._rate


def _scheduled(update: int, settings: Train, per_step: int) -> float:
    return learning_rate(
        update,
        steps=settings.steps * per_step,
        peak=settings.lr,
        warmup=settings.warmup * per_step,
        final=settings.final_lr,
    )


def _adamw(settings: Train) -> dict[str, Any]:
    return {"lr": settings.lr, "betas": (0.9, 0.95), "weight_decay": settings.weight_decay}
