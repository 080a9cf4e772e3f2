"""What all tests share: one thread per process, and a pool of worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anyone imports torch: results are compared bit for bit, and bits depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

from tests.procs import Pool


@pytest.fixture(scope="session")
def procs() -> Iterator[Pool]:
    """Runs a function as the ranks of a process group: `procs.run(function, *args, world=p)`."""
    pool = Pool()
    yield pool
    pool.close()
