"""Where randomness comes from: every draw is keyed by what it is for, never by who draws it or when.

So results do not depend on the number of ranks, the chunks, or the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def mix(*ids: int) -> int:
    """One 63-bit seed from a few whole numbers, by the splitmix64 finaliser (Steele et al. 2014) over each in turn."""
    state = 0
    for number in ids:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that torch's random functions draw from on that device."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    return module.default_generators[device.index or 0]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's random numbers start from `seed`; outside, they go on as if nothing had been drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
