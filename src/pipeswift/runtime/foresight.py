"""What both ends of a channel foresee of its next message, each by itself, so that they need not wait to be told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeswift.runtime.boundary import Meta, Spec

Shapes = tuple[tuple[Sequence[int], torch.dtype], ...]  # of the tensors of a message, with their dtypes


def shapes_of(metas: Sequence[Meta]) -> Shapes:
    return tuple((meta.shape, meta.dtype) for meta in metas)


def blank(shapes: Shapes, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)


class Foresight:
    """Shapes of messages, by the headers so far, which both ends `learn`; None where nothing is foreseen.

    now: up to the next header. next: of the message after that header, foreseen where the last two looked alike.
    """

    def __init__(self) -> None:
        self.now: Shapes | None = None
        self.next: Shapes | None = None

    def comes_true(self, spec: Spec | None) -> bool:
        """Whether `next` is what comes now. spec: None where the header describes a new one."""
        return spec is not None and shapes_of(spec.tensors) == self.next

    def learn(self, spec: Spec, uniform: bool, known: bool) -> None:
        """What a header has said. A spec that was not known may be one of a kind, as where a plain value counts."""
        shapes = shapes_of(spec.tensors) if uniform else None
        self.next = shapes if known and shapes == self.now else None
        self.now = shapes
