"""What goes through a mixture-of-experts layer, between its parts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routed(NamedTuple):
    """What goes from inlet to experts to outlet, for T tokens of which each has k assignments, kT in all.

    stream: the layer's input, to which the outlet adds. rows: (n, width), the assigned tokens, or what experts have
    made of them, sorted by slot (see `Placement`); n is kT unless some were dropped. gates: (n,), their weights.
    order: (n,), each row's number among all assignments: of token t, its choice c has c T + t. counts: (slots,).
    shared: (T, width), every token, for the shared expert, or what that has made; None without one.
    """

    stream: Tensor
    rows: Tensor
    gates: Tensor
    order: Tensor
    counts: Tensor
    shared: Tensor | None
