"""How a message lies in memory, and how both ends of a channel come to know it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeswift.runtime.boundary import Meta, Spec

Layout = tuple[tuple[Sequence[int], torch.dtype], ...]  # shape and dtype of each tensor of a message


def layout_of(metas: Sequence[Meta]) -> Layout:
    return tuple((meta.shape, meta.dtype) for meta in metas)


def blank(layout: Layout, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in layout)


class Foresight:
    """How messages will look, by the headers so far: both ends of a channel foresee alike. None where unknown."""

    def __init__(self) -> None:
        self.now: Layout | None = None  # up to the next header
        self.next: Layout | None = None  # the message that comes with that

    def learn(self, spec: Spec, uniform: bool) -> None:
        layout = layout_of(spec.tensors) if uniform else None
        self.next = layout if layout == self.now else None
        self.now = layout
