"""What a model's layers cost, for micro-batches of several sizes: seconds and bytes, measured or estimated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from pipeswift.cost import Costs
from pipeswift.errors import PipeSwiftError

FORMAT = "pipeswift-profile"
VERSION = 1

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class ProfileError(PipeSwiftError):
    """A profile that cannot be read or written, or that does not hold what is asked of it."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Timing(_Data):
    """Seconds of one pass, one entry per micro-batch size: medians, and distances between the quartiles."""

    median: tuple[Seconds, ...]
    spread: tuple[Seconds, ...]


class Layer(_Data):
    """One layer; entries of tuples are per micro-batch size.

    F, I, W, B: its passes. output_bytes: what it hands on. saved_bytes: what it keeps from F for its backward, weights
    left out. deferred_bytes: what it keeps from I for W. optimizer_bytes: the optimizer's state of its parameters.
    """

    name: str
    F: Timing
    I: Timing  # noqa: E741
    W: Timing
    B: Timing
    output_bytes: tuple[Bytes, ...]
    saved_bytes: tuple[Bytes, ...]
    deferred_bytes: tuple[Bytes, ...]
    parameter_bytes: Bytes
    optimizer_bytes: Bytes


class Profile(_Data):
    """The layers of a model in order, on one device.

    sizes: samples per micro-batch, ascending. source: "measured", or "analytic" where times follow from stated rates.
    """

    format: Literal["pipeswift-profile"] = FORMAT
    version: Literal[1] = VERSION
    source: Literal["measured", "analytic"]
    device: str
    threads: PositiveInt
    torch: str
    sizes: tuple[PositiveInt, ...]
    layers: tuple[Layer, ...]

    @model_validator(mode="after")
    def _fits(self) -> Profile:
        if not self.layers or not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("it needs at least one layer, and ascending sizes such as [1, 2, 4]")
        for number, layer in enumerate(self.layers):
            for name, value in layer:
                for row in (value.median, value.spread) if isinstance(value, Timing) else (value,):
                    if isinstance(row, tuple) and len(row) != len(self.sizes):
                        raise ValueError(
                            f"layers.{number}.{name} has {len(row)} entries for {len(self.sizes)} sizes: give one each"
                        )
        return self

    # One size as arrays. size: one of `sizes`; None is the first of them.

    def seconds(self, size: int | None = None) -> np.ndarray:
        """Median seconds, shape (4, layers), passes in the order F, I, W, B."""
        at = self._column(size)
        return np.array([[getattr(layer, op).median[at] for layer in self.layers] for op in "FIWB"])

    def output_bytes(self, size: int | None = None) -> np.ndarray:
        """Shape (layers,)."""
        return self._row("output_bytes", size)

    def saved_bytes(self, size: int | None = None) -> np.ndarray:
        """Shape (layers,)."""
        return self._row("saved_bytes", size)

    def deferred_bytes(self, size: int | None = None) -> np.ndarray:
        """Shape (layers,)."""
        return self._row("deferred_bytes", size)

    @property
    def parameter_bytes(self) -> np.ndarray:
        """Shape (layers,)."""
        return np.array([layer.parameter_bytes for layer in self.layers])

    @property
    def optimizer_bytes(self) -> np.ndarray:
        """Shape (layers,)."""
        return np.array([layer.optimizer_bytes for layer in self.layers])

    def costs(self, layout: Sequence[int], size: int | None = None, **links: Any) -> Costs:
        """The costs of stages of `layout` layers each; memory is bytes of activations. links: as in `Costs`.

        Raises ProfileError when the layout is not one of these layers.
        """
        if sum(layout) != len(self.layers) or min(layout) < 1:
            raise ProfileError(
                f"layout = {list(layout)} does not share out the {len(self.layers)} layers of the profile: "
                "give every stage at least one, and all of them together"
            )
        first = [0, *accumulate(layout)][:-1]
        last = [end - 1 for end in accumulate(layout)]
        saved, deferred = (
            np.add.reduceat(row, first).astype(np.float64)
            for row in (self.saved_bytes(size), self.deferred_bytes(size))
        )
        return Costs(
            seconds=np.add.reduceat(self.seconds(size), first, axis=1)[..., None],
            memory=np.stack([saved, deferred - saved, -deferred, -saved]),
            boundary_bytes=self.output_bytes(size)[last[:-1]].astype(np.float64),
            **links,
        )

    # JSON.

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "the profile") -> Profile:
        """Raises ProfileError, which names the entry, for anything that is no profile."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ProfileError(f"{name} is not JSON: {error}. Make one with `pipeswift profile`.") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ProfileError(
                f'{name} is no profile: it lacks "format": "{FORMAT}". Make one with `pipeswift profile`.'
            )
        if document.get("version") != VERSION:
            raise ProfileError(
                f"{name} has version {document.get('version')!r} of the format, and this PipeSwift reads {VERSION}. "
                "Make it again with `pipeswift profile`."
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            what = problem["msg"].removeprefix("Value error, ")
            raise ProfileError(f"{name}: {where + ': ' if where else ''}{what}.") from None

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """The profile in a JSON file. Raises ProfileError when there is none."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ProfileError(f"there is no profile {path}. Make one with `pipeswift profile`.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"cannot read the profile {path}: {error}.") from None
        return cls.from_json(text, str(path))

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON. Raises ProfileError when it cannot be."""
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"cannot write the profile {path}: {error}.") from None

    def _row(self, name: str, size: int | None) -> np.ndarray:
        at = self._column(size)
        return np.array([getattr(layer, name)[at] for layer in self.layers])

    def _column(self, size: int | None) -> int:
        if size is None:
            return 0
        if size not in self.sizes:
            raise ProfileError(
                f"the profile has micro-batches of {', '.join(map(str, self.sizes))} samples, and none of {size}: "
                f"use one of these, or measure it with --sizes {size}"
            )
        return self.sizes.index(size)
