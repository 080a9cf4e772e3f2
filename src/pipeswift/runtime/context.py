"""What a layer may know about the pass that it is part of; `pipeswift.nn` reads it."""

from __future__ import annotations

import threading
from typing import Any


class Context(threading.local):
    """Set by the runtime around every layer's forward; one per thread, since tests run ranks as threads.

    key: of (seed, step). layer: index in the whole model. first_sample: where this micro-batch starts in the batch.
    skips: what layers before have put aside for layers after, by name.
    """

    key: int = 0
    layer: int = 0
    first_sample: int = 0

    def __init__(self) -> None:
        self.skips: dict[str, Any] = {}


current = Context()
