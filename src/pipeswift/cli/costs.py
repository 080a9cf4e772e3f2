"""Costs as a JSON object: read from a file, and written beside a schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeswift.cost import Costs, activations
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op

SECONDS = ("F", "I", "W", "B")
KNOWN = {*SECONDS, "comm", "memory"}


class CostsFileError(PipeSwiftError):
    """A file with costs cannot be read, or says something that does not fit."""


def read(path: str, *, ranks: int, microbatches: int, chunks: int) -> Costs:
    """The costs in a JSON file: an object, or one under "costs", as in the JSON that `pipeswift search` writes.

    "F", "I", "W": seconds of a pass; one number for all stages, a list with one per stage, or a list of lists with one
    per micro-batch. "B": likewise, I + W if not given. "comm": seconds from rank to rank; one number, or a matrix
    [source][destination]; 0 if not given. "memory": {"F": ..., "I": ..., "W": ...}, what a pass adds, one number or one
    per stage; counts activations if not given. Raises CostsFileError, naming the key, for anything else.
    """
    document = _document(path)
    if unknown := set(document) - KNOWN:
        raise CostsFileError(
            f"{path}: there is no {sorted(unknown)[0]!r} in costs. They have {', '.join(sorted(KNOWN))}."
        )
    stages = ranks * chunks
    seconds = {op: _numbers(path, document, op, [(), (stages,), (stages, microbatches)]) for op in "FIW"}
    seconds["B"] = seconds["I"] + seconds["W"]
    if "B" in document:
        seconds["B"] = _numbers(path, document, "B", [(), (stages,), (stages, microbatches)])
    latency = _numbers(path, {"comm": 0.0, **document}, "comm", [(), (ranks, ranks)])
    if min(part.min() for part in (*seconds.values(), latency)) < 0:
        raise CostsFileError(f"{path}: a time is negative. Use seconds of at least 0.")
    return Costs(
        seconds=np.stack(
            [np.broadcast_to(_by_stage(seconds[op], stages), (stages, _width(seconds))) for op in SECONDS]
        ),
        memory=_memory(path, document, stages, chunks),
        boundary_bytes=np.zeros(stages - 1),
        latency=latency if latency.ndim else float(latency),
    )


def written(costs: Costs) -> dict[str, Any]:
    """What `read` reads back as equal costs, as far as F, I, W, B, latency and memory go."""
    seconds = costs.seconds[..., 0] if costs.seconds.shape[2] == 1 else costs.seconds
    return {
        **{op: seconds[number].tolist() for number, op in enumerate(SECONDS)},
        "comm": np.asarray(costs.latency).tolist(),
        "memory": {op.name: costs.memory[op].tolist() for op in (Op.F, Op.I, Op.W)},
    }


def _document(path: str) -> Mapping[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CostsFileError(f"there is no costs file {path}. Check the path.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CostsFileError(f"cannot read the costs file {path}: {error}.") from None
    if isinstance(document, dict) and isinstance(document.get("costs"), dict):
        document = document["costs"]
    if not isinstance(document, dict):
        raise CostsFileError(f'{path} holds no costs. Write an object such as {{"F": 1, "I": [1, 1.4], "W": 1}}.')
    return document


def _numbers(path: str, document: Mapping[str, Any], key: str, shapes: list[tuple[int, ...]]) -> np.ndarray:
    if key not in document:
        raise CostsFileError(f"{path} has no {key!r}. Give one number, or one per stage.")
    try:
        found = np.array(document[key], dtype=np.float64)
    except (TypeError, ValueError):
        found = np.array(np.nan)
    if found.shape not in shapes or not np.isfinite(found).all():
        wanted = " or ".join(
            "one number" if not shape else " x ".join(map(str, shape)) + " numbers" for shape in shapes
        )
        raise CostsFileError(f"{path}: {key!r} is {_short(document[key])}. It has to be {wanted}.")
    return found


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _by_stage(seconds: np.ndarray, stages: int) -> np.ndarray:
    return seconds if seconds.ndim == 2 else np.broadcast_to(seconds, stages)[:, None]


def _width(seconds: Mapping[str, np.ndarray]) -> int:
    """Columns of the table of seconds: one, or one per micro-batch."""
    return max(part.shape[1] if part.ndim == 2 else 1 for part in seconds.values())


def _memory(path: str, document: Mapping[str, Any], stages: int, chunks: int) -> np.ndarray:
    if "memory" not in document:
        return activations(stages, chunks)
    if not isinstance(document["memory"], dict):
        raise CostsFileError(f'{path}: "memory" has to be such as {{"F": 1, "I": -0.6, "W": -0.4}}.')
    F, I, W = (  # noqa: E741
        np.broadcast_to(_numbers(path, document["memory"], op, [(), (stages,)]), stages) for op in "FIW"
    )
    return np.stack([F, I, W, I + W])
