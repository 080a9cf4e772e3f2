"""Text as bytes: files that are trained on, files that are held out, and batches drawn from either."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeswift.errors import PipeSwiftError

BYTES = 256  # how many there are
_HELD_OUT_ONE_IN = 20
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """Two byte strings, uint8, that share no file."""

    training: np.ndarray
    held_out: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Equal on ranks that read the same text."""
        return ", ".join(
            f"{len(side):,} bytes {name} ({zlib.crc32(side.data):08x})"
            for name, side in (("training", self.training), ("held out", self.held_out))
        )


def standard_library() -> Path:
    """The folder of this Python's own library: text that every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def files_of(path: Path | None) -> tuple[Path, list[Path]]:
    """(root, files below it, sorted). None: the standard library's source, without tests and installed packages.

    A folder gives all its files but hidden ones; a file gives itself. Raises PipeSwiftError when nothing is there.
    """
    root = path or standard_library()
    if root.is_file():
        return root.parent, [root]
    pattern = "*" if path else "*.py"
    skipped = frozenset() if path else _NOT_SOURCE
    files = []
    for file in sorted(root.rglob(pattern)):
        parts = file.relative_to(root).parts
        if file.is_file() and not skipped.intersection(parts) and not any(part.startswith(".") for part in parts):
            files.append(file)
    if not files:
        problem = "holds no file" if root.is_dir() else "does not exist"
        raise PipeSwiftError(
            f"data.path {problem}: {root}. It must be a text file or a folder of them; "
            "leave it out to train on the Python standard library's own source."
        )
    return root, files


def is_held_out(name: str) -> bool:
    """Whether the file of this name (relative to its root, with "/") is never trained on; about one in twenty."""
    return zlib.crc32(name.encode("utf-8", "surrogateescape")) % _HELD_OUT_ONE_IN == 0


def split(root: Path, files: list[Path]) -> tuple[list[Path], list[Path]]:
    """(training, held-out) files; depends on the names only. Of several files, each side gets at least one."""
    held_out = [file for file in files if is_held_out(file.relative_to(root).as_posix())]
    if not held_out:
        held_out = files[-1:]
    if len(held_out) == len(files):
        held_out = files[:1]
    chosen = set(held_out)
    return [file for file in files if file not in chosen], held_out


def load(path: Path | None, *, window: int) -> Text:
    """Read everything below `path` (None: the standard library). A single file gives its last twentieth as held out.

    window: bytes that one sample takes; PipeSwiftError when either side is shorter.
    """
    root, files = files_of(path)
    if len(files) == 1:
        whole = _concatenate(files)
        cut = len(whole) - max(len(whole) // _HELD_OUT_ONE_IN, min(window, len(whole)))
        text = Text(whole[:cut], whole[cut:])
    else:
        training, held_out = split(root, files)
        text = Text(_concatenate(training), _concatenate(held_out))
    for side, content in (("training", text.training), ("held-out", text.held_out)):
        if len(content) < window:
            raise PipeSwiftError(
                f"data.path {path or root} has too little text: {len(content)} {side} bytes, and one sample takes "
                f"{window} (model.context + 1). Give more text or a smaller model.context."
            )
    return text


def batch(text: np.ndarray, *, size: int, context: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), int64, each of shape (size, context); targets are inputs one byte later.

    Depends on (seed, number) only, so every rank, and every number of ranks, draws the same.
    """
    starts = np.random.default_rng((seed, number)).integers(0, len(text) - context, size)
    windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def _concatenate(files: list[Path]) -> np.ndarray:
    return np.concatenate([np.fromfile(file, dtype=np.uint8) for file in files])
