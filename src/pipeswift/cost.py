"""What a schedule costs: seconds per pass, links between ranks, and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

# Ops are indexed as everywhere: F, I, W, B = 0, 1, 2, 3.


@dataclass(frozen=True)
class Costs:
    """The numbers that turn a schedule into a timeline.

    seconds: shape (4, stages, microbatches or 1); seconds[op, stage, microbatch], ops in the order F, I, W, B.
    latency: seconds from the end of a pass on one rank until its message is there on another; a number, or shape
        (ranks, ranks) with [source, destination]. Zero on the same rank.
    bandwidth: bytes per second of one link; infinite means pure latency, as in the papers.
    boundary_bytes: shape (stages - 1,); what one micro-batch sends forward (and its gradient back) over each boundary.
    serial_channels: messages of one rank to another queue behind each other, in the order they were sent.
    memory: shape (4, stages); what each op adds (positive: from its start) or frees (negative: at its end).
    overlap: seconds of an Overlap of two actions, such as their merged program's (`pipeswift.program.merge`); a number,
        or shape (stages, stages) with [first's stage, second's stage]. None, or NaN in the array, means their sum.
    """

    seconds: np.ndarray
    memory: np.ndarray
    boundary_bytes: np.ndarray
    latency: float | np.ndarray = 0.0
    bandwidth: float = float("inf")
    serial_channels: bool = False
    overlap: float | np.ndarray | None = None

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        F: float = 1.0,
        I: float = 1.0,  # noqa: E741
        W: float = 1.0,
        chunks: int = 1,
        comm: float = 0.0,
        boundary_bytes: float = 0.0,
    ) -> Costs:
        """Equal stages. F, I, W are per rank; each of a rank's `chunks` takes its share of the time and of the memory.

        Memory counts activations: +1/chunks from the start of F to the end of W (or of B).
        """
        passes = np.array([F, I, W, I + W], dtype=np.float64) / chunks
        return cls(
            seconds=np.repeat(passes[:, None, None], stages, axis=1),
            memory=activations(stages, chunks),
            boundary_bytes=np.full(max(stages - 1, 0), boundary_bytes),
            latency=comm,
        )

    @property
    def num_stages(self) -> int:
        return self.seconds.shape[1]

    @property
    def pairs(self) -> np.ndarray:
        """`overlap` by stages, shape (stages, stages), or (1, 1) where it is the same for all; NaN for the sum."""
        return np.atleast_2d(np.array(np.nan if self.overlap is None else self.overlap, dtype=np.float64))

    def with_memory(self, F: float, I: float, W: float) -> Costs:  # noqa: E741
        """The same costs with other memory increments per pass of a stage, in the caller's unit (say bytes)."""
        column = np.array([F, I, W, I + W], dtype=np.float64)[:, None]
        return replace(self, memory=np.repeat(column, self.num_stages, axis=1))


def activations(stages: int, chunks: int = 1) -> np.ndarray:
    """Memory increments that count live activations, in units of one rank's share of the model, shape (4, stages).

    A chunk counts 1/chunks, alive from the start of its F to the end of its B or W.
    """
    share = 1.0 / chunks
    return np.repeat(np.array([share, 0.0, -share, -share])[:, None], stages, axis=1)
