"""Ctrl-C as a question that a search asks when it can stop, not as an exception in the middle of compiled code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is noted, which the function given tells; the second does what it did outside.

    An exception would come anywhere, and Numba does not survive one while it loads machine code. Only the main thread
    hears Ctrl-C, and only where it is not ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield lambda: False
        return
    pressed = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
