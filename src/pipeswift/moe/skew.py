"""Skew, for experiments: a bias on a router's logits that gives it favourites, so that loads of experts are uneven."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.context import Place
from pipeswift.runtime.seeds import mix

Pattern = Literal["fixed", "drifting", "bursty"]
PATTERNS = ("fixed", "drifting", "bursty")
SHARE = 4  # one in so many experts is a favourite, and one in so many micro-batches has a burst
PACE = 4  # steps after which drifting favourites move on


@dataclass(frozen=True)
class Skew:
    """A quarter of a layer's experts, neighbours, are its favourites, and their logits are `strength` higher.

    pattern: "fixed", the first experts of every layer; "drifting", from a place of each layer's own on, moving over the
        experts by one every 4 steps; "bursty", in a quarter of the micro-batches, at random, experts at random.
    strength: above 0; the logits of a layer that has not been trained differ from token to token by about 1.
    Which they are depends on seed, step, layer and the micro-batch's number in its replica alone, so micro-batches that
    replicas run at a time are alike. No random number of the model is used up.
    Raises PipeSwiftError for other values.
    """

    pattern: Pattern
    strength: float = 2.0

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise PipeSwiftError(
                f'skew pattern = {self.pattern!r} is none of "fixed", "drifting" and "bursty": use "fixed"'
            )
        if not 0 < self.strength < math.inf:
            raise PipeSwiftError(f"skew strength = {self.strength} is no number of logits above 0: use 2.0, say")

    def favourites(self, experts: int, place: Place) -> tuple[int, ...]:
        """Those of so many experts that one micro-batch likes better at one layer; none where it is without a burst."""
        first = 0
        if self.pattern == "drifting":
            first = mix(place.layer) + place.step // PACE
        elif self.pattern == "bursty":
            first, quiet = divmod(mix(place.key, place.layer, place.microbatch), SHARE)
            if quiet:
                return ()
        return tuple((first + number) % experts for number in range(max(experts // SHARE, 1)))

    def apply(self, logits: Tensor, place: Place) -> Tensor:
        """logits: (tokens, experts), of one micro-batch."""
        bias = torch.zeros(logits.shape[-1], dtype=logits.dtype)
        bias[list(self.favourites(len(bias), place))] = self.strength
        return logits + bias.to(logits.device)
