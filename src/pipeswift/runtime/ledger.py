"""Where the backwards of a stage leave for W what can wait, and which gradients cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeswift.runtime.pending import Pending
from pipeswift.runtime.rules import Gradients


class Ledger:
    """Takes what backwards leave for W. Outside `leaving`, weights' gradients are made at once.

    An object that the graph refers to, and no thread-local: on an accelerator backwards run in threads of autograd's.

    stand_ins: by the id of a weight, what the input's gradient is made with instead of it.
    """

    def __init__(self) -> None:
        self.stand_ins: dict[int, Tensor] = {}
        self._pendings: list[Pending] | None = None
        self._found: dict[object, tuple[object, set[int]]] = {}  # by piece: when, and ids of weights covered in part
        self._at_once: set[int] = set()  # those of the piece that an I goes through: their gradients do not wait

    def stand_in(self, weight: Tensor) -> Tensor:
        return self.stand_ins.get(id(weight), weight)

    @property
    def is_open(self) -> bool:
        """Whether an I runs."""
        return self._pendings is not None

    @contextmanager
    def leaving(self, piece: object, edges: Iterable[GradientEdge], when: object = 0) -> Iterator[list[Pending]]:
        """Around an I, a backward from `edges` through a piece of the model: what it leaves for W.

        Where rules cover some uses of a weight and not others, all of its gradients are made in I, since nothing else
        sums them in autograd's order. A piece is searched for such weights once per `when`.
        """
        if piece not in self._found or self._found[piece][0] != when:
            self._found[piece] = when, self._covered_in_part(edges)
        _, self._at_once = self._found[piece]
        self._pendings = pendings = []
        try:
            yield pendings
        finally:
            self._pendings = None

    def leave(self, pending: Pending) -> Gradients:
        """Within `leaving`: keeps for W what can wait; returns the other gradients, None for those that wait."""
        assert self._pendings is not None
        waits: Pending | None = pending
        due = None
        if self._at_once:
            waits = pending.of(lambda weight: id(weight) not in self._at_once)
            due = pending.of(lambda weight: id(weight) in self._at_once)
        if waits is not None:  # detached, since what leads back to the graph would keep it alive until W
            self._pendings.append(waits._replace(x=waits.x.detach()))
        return (None,) * len(pending.parameters) if due is None else due.gradients()

    def _covered_in_part(self, edges: Iterable[GradientEdge]) -> set[int]:
        """Ids of the weights to which nodes of this ledger and others lead, in the graph behind `edges`."""
        nodes = _behind(edges)
        mine = {node for node in nodes if getattr(node, "ledger", None) is self}
        uses = [use for node in mine for use in zip(node.casts, node.weights, strict=True)]
        casts = {cast: weight for cast, weight in uses if cast is not None}

        covered = [edge for node in mine for edge in node.next_functions[1:]]
        others = [node.next_functions[0] for node in mine]  # to x, which may be a weight itself
        others += [edge for node in nodes - mine - casts.keys() for edge in node.next_functions]  # casts are no uses

        def reached(edges: Sequence[tuple[Any, int]]) -> set[int]:
            return {id(casts.get(node, getattr(node, "variable", None))) for node, _ in edges} - {id(None)}

        return reached(covered) & reached(others)


def _behind(edges: Iterable[GradientEdge]) -> set[Any]:
    """All nodes of the graph that a backward from `edges` would go through."""
    nodes: set[Any] = {edge.node for edge in edges}
    left = [*nodes]
    while left:
        found = {node for node, _ in left.pop().next_functions if node is not None} - nodes
        nodes |= found
        left += found
    return nodes
