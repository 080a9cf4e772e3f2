"""What the runtime asks of the middle of a mixture-of-experts segment; `pipeswift.moe` has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from pipeswift.ir import Op
from pipeswift.program import BlockCosts, Form, Grain, Work
from pipeswift.runtime.auxiliary import Auxiliary
from pipeswift.runtime.boundary import Flat
from pipeswift.runtime.groups import Group
from pipeswift.runtime.lanes import Lanes


class Exchange(Protocol):
    """Between two segments of a stage: what the first one makes travels to experts and back, in several steps.

    `enter` and `leave` begin and end a pass: in F with what the segments make and take, in a backward with gradients of
    that. Between them, `run` does one work of the pass's program; those of the all-to-all lane in that lane's thread.
    """

    @property
    def form(self) -> Form: ...

    def enter(self, op: Op, microbatch: int, value: Any) -> None: ...

    def leave(self, op: Op, microbatch: int) -> Flat | tuple[Tensor, ...]: ...

    def run(self, work: Work, microbatch: int) -> None: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    @property
    def most(self) -> int:
        """In how many chunks a pass can be."""
        ...

    def regroup(self, grain: Grain) -> None:
        """From the next pass on they are cut so; none is under way."""
        ...

    def measure(self, lanes: Lanes) -> BlockCosts:
        """What its works take with the loads that it has seen. Every rank of the group calls this, between passes."""
        ...


class Divided(NamedTuple):
    """A layer in three: the end of one segment, what lies between, and the start of the next."""

    inlet: nn.Module
    exchange: Exchange
    outlet: nn.Module


class Divisible(Protocol):
    """A layer with experts that several ranks may share out. divisible: says so."""

    divisible: bool

    def settle(self, rank: int, ranks: int) -> None: ...

    def report(self, auxiliary: Auxiliary, name: str) -> None: ...

    def divide(self, name: str, group: Group, grain: Grain) -> Divided: ...


def divisible_parts(layer: nn.Module) -> Iterable[tuple[str, Any]]:
    """(name, part) of the parts of a layer, itself included, that have experts to share out."""
    return ((name, part) for name, part in layer.named_modules() if getattr(part, "divisible", False))
