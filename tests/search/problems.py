"""Problems that several tests of the search solve."""

from __future__ import annotations

from typing import NamedTuple

from pipeswift.cost import Costs
from pipeswift.ir import Placement, loop
from pipeswift.search.problem import Objective, Problem


class Row(NamedTuple):
    """One row of Qi et al. 2024, tables 5 and 9: p = 8, milliseconds, and the bubble rates by span."""

    model: str
    m: int
    F: float
    I: float  # noqa: E741
    W: float
    comm: float
    zb_1p: float
    zb_2p: float

    @property
    def memory(self) -> tuple[float, float, float]:
        """What F, I and W add, in bytes, of which M_B = sb(34h + 5as) and M_W = 32sbh."""
        s, b, h, a = {"1.5B": (1024, 6, 2304, 24), "6.2B": (1024, 3, 4096, 32)}[self.model]
        held, kept = s * b * (34 * h + 5 * a * s), 32 * s * b * h
        return held, kept - held, -kept


TABLE5 = [
    Row("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    Row("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    Row("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    Row("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    Row("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    Row("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
]


def problem(
    ranks: int,
    microbatches: int,
    times: tuple[float, float, float, float],
    *,
    memory: tuple[float, float, float] | None = (1, 0, -1),
    limit: float = float("inf"),
    chunks: int = 1,
    placement: Placement = loop,
    objective: Objective = "span",
    variability: float = 0.0,
) -> Problem:
    """Equal stages; `times` are F, I, W and the latency; memory per pass of a stage, None for counts of activations."""
    F, I, W, comm = times  # noqa: E741
    costs = Costs.uniform(ranks * chunks, F=F, I=I, W=W, comm=comm, chunks=chunks)
    if memory is not None:
        costs = costs.with_memory(*memory)
    return Problem(costs, ranks, microbatches, chunks, placement, limit, objective, variability)
