"""Where a command's output goes: a file, standard output, the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from pipeswift.errors import PipeSwiftError

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def opened(target: str, setting: str, *, binary: bool = False) -> Iterator[IO]:
    """`target` open for writing; "-" is standard output. Errors name `setting`, the option that asked for it."""
    if target == "-":
        yield sys.stdout
        return
    try:
        with open(target, "wb") if binary else open(target, "w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        text = f"{setting} cannot write {target}: {error.strerror}. Give a file in a folder that is there and writable."
        raise PipeSwiftError(text) from error


def console() -> Console:
    """Standard output for Rich; as wide as the terminal, or 160 where there is none."""
    from rich.console import Console

    return Console(width=shutil.get_terminal_size((160, 24)).columns, highlight=False, markup=False)
