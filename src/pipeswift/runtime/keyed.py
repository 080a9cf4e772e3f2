"""Random numbers by sample: keyed by the seed, the step, the layer and each sample's index in the mini-batch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeswift.runtime.context import Place, mark, place_of
from pipeswift.runtime.seeds import generator_of, mix


def place_on(device: torch.device) -> Place:
    """Where the layer that runs there draws its random numbers; outside of a pipeline, at the start of everything."""
    seed = generator_of(device).initial_seed()
    return place_of(seed) or Place(seed, 0, 0, 0, [])


def draw_by_sample(like: Tensor, fill: Callable[[Tensor, torch.Generator], object]) -> Tensor:
    """A tensor like `like`, (samples, ...), of which `fill(sample's part, generator)` fills each sample's part.

    The layer that calls this, or one around it, has `keyed = True`, else every micro-batch gets the same numbers. The
    same when a forward is run again by activation checkpointing that preserves the random state, as it does by default.
    """
    shared = generator_of(like.device)
    place = place_on(like.device)
    drawn = torch.empty_like(like)
    own = torch.Generator(like.device)
    for sample in range(like.shape[0]):
        own.manual_seed(mix(place.key, place.layer, place.first_sample + sample, place.use))
        fill(drawn[sample], own)
    # The next draw of this pass gets other numbers, and gets them again when the forward is run again.
    following = mix(shared.initial_seed(), 1)
    shared.manual_seed(following)
    if place.seeds:
        mark(following, place._replace(use=place.use + 1))
    return drawn
