"""The optimizer step of a pipeline: any torch optimizer on each rank, one gradient norm for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.runtime.peers import Peers
from pipeswift.runtime.progress import Progress
from pipeswift.runtime.ties import Tie
from pipeswift.runtime.weights import Weights


class NonFinite(PipeSwiftError):
    """A gradient is infinite or not a number."""


class Optimizer:
    """Wraps this rank's torch optimizer, `inner` (None on a rank without parameters to train)."""

    def __init__(
        self,
        peers: Peers,
        weights: Mapping[int, Weights],
        ties: Sequence[Tie],
        kind: Callable[..., torch.optim.Optimizer],
        settings: dict[str, Any],
        progress: Progress,
    ):
        self._peers, self._weights, self._progress = peers, list(weights.values()), progress
        trained = [leaf for version in self._weights for leaf in version.leaves.values() if leaf.requires_grad]
        self.inner = kind(trained, **settings) if trained else None
        self.skipped = 0  # steps that a non-finite gradient prevented
        self._slots, self._num_slots = _number(peers, weights, ties)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, for learning-rate schedules; empty on a rank without parameters."""
        return self.inner.param_groups if self.inner else []

    def step(self, *, clip_norm: float | None = None, nonfinite: Literal["skip", "stop"] = "skip") -> float:
        """Updates the weights, then forgets the gradients. Returns the gradient norm over the whole model, unclipped.

        clip_norm: gradients are scaled so that this norm is at most that.
        nonfinite: when a gradient anywhere in the model is infinite or not a number (the returned norm then is, too),
            all ranks leave the weights as they are, or all raise NonFinite.
        Every rank must call this.
        """
        if clip_norm is not None and not clip_norm >= 0:
            raise PipeSwiftError(f"clip_norm = {clip_norm} is no number from 0: use 1.0, or None to leave gradients be")
        if nonfinite not in ("skip", "stop"):
            raise PipeSwiftError(f'nonfinite = {nonfinite!r} is neither "skip" nor "stop": use "skip"')
        with self._progress.during("optimizer"):
            return self._step(clip_norm, nonfinite)

    def _step(self, clip_norm: float | None, nonfinite: Literal["skip", "stop"]) -> float:
        norm = self.gradient_norm()
        if not isfinite(norm):
            self.zero_grad()
            self.skipped += 1
            if nonfinite == "stop":
                raise NonFinite(f"the gradient norm of the model is {norm}: no rank has changed its weights")
            return norm
        if clip_norm is not None:
            # The same formula, in the same precision, as torch.nn.utils.clip_grad_norm_.
            factor = min(1.0, clip_norm / (norm + 1e-6))
            for leaf in self._leaves_with_gradient():
                assert leaf.grad is not None
                leaf.grad.mul_(factor)
        if self.inner:
            self.inner.step()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for version in self._weights:
            version.clear()

    def gradient_norm(self) -> float:
        """The L2 norm over all parameters of all ranks, on every rank.

        A left fold in float64 of squared norms per parameter, in model order: the same bits whatever the number of
        ranks and the schedule. Of replicas, which hold equal gradients, the first speaks.
        """
        squares = torch.zeros(self._num_slots, dtype=torch.float64)
        for version in self._weights:
            for name in version.leaves:
                slot = self._slots.get((name, self._peers.replicas.rank))
                if slot is not None and (gradient := version.gradient(name)) is not None:
                    squares[slot] = gradient.double().square().sum().item()
        total = 0.0
        with self._progress.joining("the gradient norm"):
            self._peers.everyone.all_sum(squares)
        for square in squares.tolist():
            total += square
        return total**0.5

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict() if self.inner else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.inner:
            self.inner.load_state_dict(state)

    def _leaves_with_gradient(self) -> list[Tensor]:
        return [leaf for version in self._weights for leaf in version.leaves.values() if leaf.grad is not None]


def _number(
    peers: Peers, weights: Mapping[int, Weights], ties: Sequence[Tie]
) -> tuple[dict[tuple[str, int], int], int]:
    """(the numbers of the parameters that this rank speaks for, how many there are in the model).

    They are numbered in (stage, parameter) order; of copies, on other ranks, the first speaks. By (name, replica): that
    of the first, and for experts of each that holds others under the name.
    """
    silent = {(rank, tie.holders[rank]) for tie in ties for rank in tie.ranks[1:]}
    ep = peers.replicas.experts.size
    mine = {
        stage: [(name, replica) for name in version.leaves for replica in range(ep if name in version.experts else 1)]
        for stage, version in weights.items()
    }
    members: dict[int, dict[tuple[str, int], None]] = defaultdict(dict)
    for rank, theirs in enumerate(peers.all_gather(mine)):
        for stage, held in theirs.items():
            members[stage] |= dict.fromkeys(member for member in held if (rank, member[0]) not in silent)
    order = [member for stage in sorted(members) for member in members[stage]]
    slots = {member: number for number, member in enumerate(order) if (peers.rank, member[0]) not in silent}
    return slots, len(order)
