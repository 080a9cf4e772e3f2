"""The problem: layers, the machine, and what a cut has to keep; checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeswift.errors import PipeSwiftError

if TYPE_CHECKING:
    from pipeswift.plan.profile import Profile

Numbers = float | Sequence[float] | np.ndarray
Transfers = Literal["beside", "within"]
Objective = Literal["rank", "stage"]
TRANSFERS: tuple[Transfers, ...] = ("beside", "within")
OBJECTIVES: tuple[Objective, ...] = ("rank", "stage")


class PartitionError(PipeSwiftError):
    """A partition was asked for with numbers that do not fit."""


class Infeasible(PartitionError):
    """No cut keeps the limits."""


@dataclass(frozen=True)
class Layers:
    """What each layer costs, per micro-batch; float64 arrays of shape (layers,).

    seconds: forward and backward, on a rank of speed 1. output_bytes: what goes to the next layer (the last's is not
    used). saved_bytes: activations kept for the backward. parameter_bytes: one version of the weights. state_bytes:
    whatever else is there once, as gradients and optimizer state.
    """

    seconds: np.ndarray
    output_bytes: np.ndarray
    saved_bytes: np.ndarray
    parameter_bytes: np.ndarray
    state_bytes: np.ndarray

    @classmethod
    def of(
        cls,
        seconds: Numbers,
        *,
        output_bytes: Numbers = 0.0,
        saved_bytes: Numbers = 0.0,
        parameter_bytes: Numbers = 0.0,
        state_bytes: Numbers = 0.0,
    ) -> Layers:
        """Numbers stand for all layers, sequences have one per layer. Raises PartitionError, naming the argument."""
        count = len(np.atleast_1d(np.asarray(seconds)))
        given = {
            "seconds": seconds,
            "output_bytes": output_bytes,
            "saved_bytes": saved_bytes,
            "parameter_bytes": parameter_bytes,
            "state_bytes": state_bytes,
        }
        return cls(**{name: _column(name, value, count, "layer") for name, value in given.items()})

    @classmethod
    def profiled(cls, profile: Profile, size: int | None = None, *, split: bool = False) -> Layers:
        """The layers of a profile, with micro-batches of `size` samples (its first size if not given).

        split: the backward is I and W, each timed by itself, and not one B. Gradients take as much as the parameters.
        """
        F, I, W, B = profile.seconds(size)  # noqa: E741
        return cls.of(
            F + (I + W if split else B),
            output_bytes=profile.output_bytes(size),
            saved_bytes=profile.saved_bytes(size),
            parameter_bytes=profile.parameter_bytes,
            state_bytes=profile.parameter_bytes + profile.optimizer_bytes,
        )

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Machine:
    """The ranks, in pipeline order.

    speeds: a layer takes its seconds over this. memory: bytes. hosts: which host each rank is on. inside, between:
    bytes per second of one link within a host and from host to host.
    """

    speeds: np.ndarray
    memory: np.ndarray
    hosts: np.ndarray
    inside: float
    between: float

    @classmethod
    def of(
        cls,
        ranks: int,
        *,
        speeds: Numbers = 1.0,
        memory: Numbers = float("inf"),
        ranks_per_host: int | None = None,
        inside: float = float("inf"),
        between: float | None = None,
    ) -> Machine:
        """Numbers stand for all ranks, sequences have one per rank; one host, unless `ranks_per_host` is given.

        between: equals `inside` if not given. Raises PartitionError, naming the argument.
        """
        if ranks < 1:
            raise PartitionError(f"ranks must be at least 1: got {ranks}. Use 1 or more.")
        if ranks_per_host is not None and ranks_per_host < 1:
            raise PartitionError(f"ranks_per_host must be at least 1: got {ranks_per_host}. Use 1 or more.")
        between = inside if between is None else between
        if not 0 < between <= inside:
            raise PartitionError(
                f"bandwidths must be above 0, and between hosts at most as high as inside: got inside {inside:g}, "
                f"between {between:g}. Swap them, or use {inside:g} for both."
            )
        machine = cls(
            speeds=_column("speeds", speeds, ranks, "rank"),
            memory=_column("memory", memory, ranks, "rank", finite=False),
            hosts=np.arange(ranks) // (ranks_per_host or ranks),
            inside=float(inside),
            between=float(between),
        )
        for name, values, use in (
            ("speeds", machine.speeds, "1 for the usual speed"),
            ("memory", machine.memory, "bytes, or inf for no limit"),
        ):
            if not values.min() > 0:
                raise PartitionError(f"{name} must be above 0: got {values.min():g}. Use {use}.")
        return machine

    def __len__(self) -> int:
        return len(self.speeds)


@dataclass(frozen=True)
class Problem:
    """Layers to be cut into contiguous stages, none empty, for the ranks of a machine in their order.

    rank_of: which rank holds each stage (a schedule's route); stage s on rank s if not given.
    replicate: a stage may take several consecutive ranks, which share its micro-batches out; all ranks are used.
    in_flight: micro-batches whose activations a stage keeps, shape (stages,); with `replicate`, those of each replica,
        shape (ranks, ranks) with [first rank, replicas - 1]. 0 if not given.
    versions: of the weights, likewise; 1 if not given.
    together: layers that no cut follows. apart: layers that a cut follows.
    transfers: a boundary takes 2 output_bytes / bandwidth (forward and gradient). "beside": while the ranks compute, so
        it is a term of its own (Narayanan et al. 2019, PipeDream, sec. 3.1). "within": ranks wait for it, so it adds to
        the stages on both sides. It is free between stages of one rank.
    objective: of what the slowest is minimised when ranks hold several stages: of ranks, whose stages add up (as do the
        boundaries of a pair of ranks), or of single stages. Without such ranks they are the same.
    """

    layers: Layers
    machine: Machine
    rank_of: tuple[int, ...] = ()
    replicate: bool = False
    in_flight: np.ndarray | None = None
    versions: np.ndarray | None = None
    together: frozenset[int] = field(default_factory=frozenset)
    apart: frozenset[int] = field(default_factory=frozenset)
    transfers: Transfers = "beside"
    objective: Objective = "rank"

    def __post_init__(self) -> None:
        if not self.rank_of:
            object.__setattr__(self, "rank_of", tuple(range(len(self.machine))))
        for setting, value, known in (
            ("transfers", self.transfers, TRANSFERS),
            ("objective", self.objective, OBJECTIVES),
        ):
            if value not in known:
                raise PartitionError(f"{setting} must be {' or '.join(known)}: got {value!r}. Use {known[0]}, say.")
        self._check_places()
        self._check_counts("in_flight", self.in_flight)
        self._check_counts("versions", self.versions)
        self._check_pins()

    def _check_places(self) -> None:
        ranks = len(self.machine)
        if self.replicate and self.rank_of != tuple(range(ranks)):
            raise PartitionError(
                "replicate needs one stage per rank: got chunks, or ranks in another order. Leave one of the two out."
            )
        if set(self.rank_of) != set(range(ranks)):
            raise PartitionError(
                f"rank_of must name each of the {ranks} ranks: got {list(self.rank_of)}. Use {list(range(ranks))}, say."
            )

    def _check_counts(self, setting: str, counts: np.ndarray | None) -> None:
        ranks = len(self.machine)
        shape = (ranks, ranks) if self.replicate else (self.stages,)
        if counts is not None and (np.shape(counts) != shape or np.min(counts) < 0):
            raise PartitionError(
                f"{setting} must be counts of at least 0, shape {shape}: got shape {np.shape(counts)}. "
                "Take them from the schedule, or leave them out."
            )

    def _check_pins(self) -> None:
        layers, stages = len(self.layers), self.stages
        for setting, pins in (("together", self.together), ("apart", self.apart)):
            if wrong := sorted(layer for layer in pins if not 0 <= layer < layers - 1):
                raise PartitionError(
                    f"{setting} names layers that another one follows, 0 to {layers - 2}: got {wrong[0]}. Leave it out."
                )
        if both := sorted(self.together & self.apart):
            raise PartitionError(
                f"layer {both[0]} is both in together and in apart: a cut follows it or not. Take it out of one."
            )
        if len(self.apart) >= stages:
            raise PartitionError(
                f"apart asks for {len(self.apart) + 1} stages, and there are {stages}. Use at most {stages - 1} cuts."
            )
        pieces = layers - len(self.together)
        if pieces < stages and not self.replicate:
            what = f"{layers} layers" + (f" with {layers - pieces} cuts forbidden" if self.together else "")
            raise PartitionError(
                f"{what} make at most {pieces} stages, and {stages} are asked for ({len(self.machine)} ranks"
                f"{f' with {self.chunks} chunks' if self.chunks > 1 else ''}). Use at most {pieces} stages, since none "
                "may be empty, or allow replicas."
            )

    @property
    def stages(self) -> int:
        """Stages, or with `replicate` the most of them."""
        return len(self.rank_of)

    @cached_property
    def chunks(self) -> int:
        """The most stages that a rank holds."""
        return int(np.bincount(self.rank_of).max())

    @cached_property
    def cuts(self) -> np.ndarray:
        """Where a stage may begin or end, bool, shape (layers + 1,); cut c is between layers c - 1 and c."""
        allowed = np.ones(len(self.layers) + 1, dtype=bool)
        allowed[[layer + 1 for layer in self.together]] = False
        return allowed


def _column(name: str, value: Numbers, count: int, of: str, *, finite: bool = True) -> np.ndarray:
    try:
        found = np.asarray(value, dtype=np.float64)
        found = np.array(np.broadcast_to(found, count)) if found.ndim < 2 else found
    except ValueError:
        found = np.empty(0)
    if found.shape != (count,) or not count:
        got = np.size(np.asarray(value, dtype=object))
        raise PartitionError(f"{name} must be one number, or {max(count, 1)}, one per {of}: got {got}. Give as many.")
    if np.isnan(found).any() or (found < 0).any() or (finite and np.isinf(found).any()):
        raise PartitionError(
            f"{name} must be {'finite ' if finite else ''}numbers of at least 0: got {found.tolist()}."
        )
    found.setflags(write=False)
    return found
