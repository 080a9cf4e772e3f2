"""Layers in training or in evaluation mode, from call to call."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Modes:
    """Remembers which parts of a layer its user keeps in evaluation mode, while the layer is evaluated."""

    def __init__(self) -> None:
        self._kept_still: dict[nn.Module, list[nn.Module]] = {}

    def set(self, layers: Iterable[nn.Module], training: bool) -> None:
        """Layers into training or evaluation; parts that the caller keeps in evaluation mode stay in it."""
        for layer in layers:
            if layer.training == training:
                continue
            if not training:
                self._kept_still[layer] = [part for part in layer.modules() if not part.training]
            layer.train(training)
            if training:
                for part in self._kept_still.pop(layer, ()):
                    part.training = False
