"""The mixture-of-experts layer: an inlet that routes tokens, experts, and an outlet that adds up what they made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.moe.exchange import ExpertExchange
from pipeswift.moe.experts import Experts
from pipeswift.moe.placement import Placement, contiguous, shuffled
from pipeswift.moe.routed import Routed
from pipeswift.moe.router import Choice, Router, Scoring, capacity
from pipeswift.moe.skew import Skew
from pipeswift.program import Grain
from pipeswift.runtime.auxiliary import Auxiliary, Figures, attach
from pipeswift.runtime.context import surroundings
from pipeswift.runtime.exchange import Divided
from pipeswift.runtime.groups import Group

Overflow = Literal["drop", "residual"]
OVERFLOWS = ("drop", "residual")
Arrangement = Literal["contiguous", "random"]
ARRANGEMENTS = ("contiguous", "random")
Payload = Literal["full", "bfloat16"]
PAYLOADS: Mapping[str, torch.dtype | None] = {"full": None, "bfloat16": torch.bfloat16}


class Dispatch(NamedTuple):
    """Slots from low up to high are of this rank. payload: the type in which rows travel, if not their own."""

    low: int
    high: int
    payload: torch.dtype | None

    def figures(self, counts: Tensor, like: Tensor) -> dict[str, Tensor]:
        """Of so many rows by slot: those that each rank takes, the bytes that are sent away, and those saved."""
        rows = counts.sum() - counts[self.low : self.high].sum()
        size = (self.payload or like.dtype).itemsize
        return {
            "taken": counts.view(-1, self.high - self.low).sum(1),
            "sent": rows * like.shape[-1] * size,
            "saved": rows * like.shape[-1] * (like.dtype.itemsize - size),
        }


class Inlet(nn.Module):
    """Normalises, routes and sorts; drops what is over capacity, and adds the auxiliary losses to the graph."""

    slot_of: Tensor

    def __init__(
        self,
        norm: nn.Module,
        router: Router,
        placement: Placement,
        *,
        shared: bool,
        capacity_factor: float | None,
        overflow: Overflow,
        balance: float,
        z: float,
    ):
        super().__init__()
        self.norm, self.router = norm, router
        self.has_shared, self.capacity_factor, self.overflow = shared, capacity_factor, overflow
        self.coefficients = balance, z
        self.told: tuple[Auxiliary, str] | None = None  # whom it tells of losses and loads, and under which name
        self.loss: Tensor | None = None  # of the last forward, where nobody is told
        self.dispatch: Dispatch | None = None  # where ranks share out the experts
        self.register_buffer("slot_of", torch.tensor(placement.slot_of), persistent=False)

    def forward(self, x: Tensor) -> Routed:
        """x: (samples, ..., width)."""
        normed = self.norm(x)
        choice = self.router(normed)
        tokens = normed.flatten(0, -2)
        slots = self.slot_of[choice.experts].t().flatten()  # first choices come before second ones
        counts = torch.bincount(slots, minlength=len(self.slot_of))
        order = slots.argsort(stable=True)
        gates = choice.gates.t().flatten().to(tokens.dtype)
        stream, room = x, self._room(len(tokens))
        asked = counts
        if room is not None:
            place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[slots[order]]
            fits = place < room
            if self.overflow == "residual":
                spilt = order[~fits]
                rows = tokens[spilt % len(tokens)]
                stream = x + _by_token(rows, gates[spilt], spilt, self.router.top_k, like=x)
            order, counts = order[fits], counts.clamp(max=room)
        sums = {"rows": asked[self.slot_of], "dropped": asked.sum() - counts.sum()}
        if self.dispatch is not None:
            sums |= self.dispatch.figures(counts, like=tokens)
        stream = self._tell(stream, choice, sums)
        # A copy where the shared expert sees the tokens, so that its gradient and the experts' come apart.
        shared = tokens.view_as(tokens) if self.has_shared else None
        return Routed(stream, tokens[order % len(tokens)], gates[order], order, counts, shared)

    def _room(self, tokens: int) -> int | None:
        """How many rows each expert takes; None: all."""
        if self.capacity_factor is None:
            return None
        return capacity(self.capacity_factor, tokens, self.router.top_k, len(self.slot_of))

    def _tell(self, stream: Tensor, choice: Choice, sums: dict[str, Tensor]) -> Tensor:
        balance, z = self.coefficients
        loss = balance * choice.balance + z * choice.z if balance or z else None
        if self.told is None:
            self.loss = loss
            return stream
        auxiliary, name = self.told
        auxiliary.tell(name, Figures(sums, means={"balance": choice.balance.detach(), "z": choice.z.detach()}))
        return stream if loss is None or not torch.is_grad_enabled() else attach(stream, loss, auxiliary)


class Outlet(nn.Module):
    """stream + the sum over a token's assignments of gate x what the expert made + what the shared expert made."""

    def __init__(self, top_k: int):
        super().__init__()
        self.top_k = top_k

    def forward(self, routed: Routed) -> Tensor:
        y = routed.stream + _by_token(routed.rows, routed.gates, routed.order, self.top_k, like=routed.stream)
        return y if routed.shared is None else y + routed.shared.view_as(y)


class MoE(nn.Module):
    """y = x + the sum over a token's best experts e of gate_e expert_e(norm(x)); x: (samples, ..., width).

    experts, hidden: how many feed-forward networks, and their inner width. top_k, scoring, jitter: see `Router`.
    shared: inner width of an expert that every token passes; 0 for none. norm: by default a LayerNorm.
    balance, z: coefficients of the load-balance loss (1 when even) and of the mean squared log-sum-exp of the router's
        logits (Zoph et al. 2022, ST-MoE, sec. 3.1). Within a pipeline they join the loss, as means over micro-batches;
        elsewhere `loss`, of the last forward, is for the caller to add.
    capacity_factor: None, and no token is ever dropped; else an expert takes that many times an even share of the
        micro-batch, first choices and early tokens first. overflow: for the rest the expert gives nothing ("drop"), or
        hands the token on as it is ("residual").
    placement: of experts on the ranks of an expert-parallel group, "contiguous" or "random".
    payload: the type in which tokens travel to experts on other ranks, "full" for their own, or "bfloat16"; what
        experts make, and all gradients, travel in full.
    skew: for experiments, favourites of the router, in training and evaluation; its losses and gates see them, too.
    scale: of what is added to x, at the start of training. kind: makes the experts of a rank, as `Experts` does.
    Raises PipeSwiftError for sizes and settings that do not fit each other.
    """

    divisible = True  # tells the runtime that ranks may share out its experts

    def __init__(
        self,
        width: int,
        *,
        experts: int,
        hidden: int,
        top_k: int = 2,
        scoring: Scoring = "softmax",
        shared: int = 0,
        norm: nn.Module | None = None,
        balance: float = 0.01,
        z: float = 0.0,
        jitter: float = 0.0,
        capacity_factor: float | None = None,
        overflow: Overflow = "drop",
        placement: Arrangement = "contiguous",
        payload: Payload = "full",
        skew: Skew | None = None,
        scale: float = 1.0,
        kind: Callable[..., nn.Module] = Experts,
    ):
        super().__init__()
        _check(capacity_factor, overflow, placement, payload)
        self._payload = PAYLOADS[payload]
        self._arrangement: Arrangement = placement
        self._seed = int(torch.randint(2**62, ()))
        self.placement = self._place(experts, surroundings.expert_ranks)
        self._rank = surroundings.expert_rank
        self.inlet = Inlet(
            norm or nn.LayerNorm(width),
            Router(width, experts, top_k, scoring=scoring, jitter=jitter, skew=skew),
            self.placement,
            shared=bool(shared),
            capacity_factor=capacity_factor,
            overflow=overflow,
            balance=balance,
            z=z,
        )
        self.experts = kind(width, hidden, self.placement.held_by(self._rank), seed=self._seed, scale=scale)
        self.shared = _feed_forward(width, shared, scale) if shared else None
        self.outlet = Outlet(top_k)

    @property
    def loss(self) -> Tensor | None:
        """The auxiliary losses of the last forward, weighted by their coefficients; None when there are none."""
        return self.inlet.loss

    def forward(self, x: Tensor) -> Tensor:
        """All of it in one; only where all experts are here."""
        if self.placement.ranks > 1:
            raise PipeSwiftError(
                f"this MoE has its experts spread over ep = {self.placement.ranks} ranks, but it is called within "
                "another layer, where its all-to-alls cannot be scheduled: make it a layer of its own, or a part of an "
                "nn.Sequential that is a layer"
            )
        routed = self.inlet(x)
        rows = self.experts(routed.rows, routed.counts.tolist())
        shared = None if self.shared is None else self.shared(routed.shared)
        return self.outlet(routed._replace(rows=rows, shared=shared))

    def settle(self, rank: int, ranks: int) -> None:
        """Keeps the experts of that rank of an expert-parallel group; a layer that was built there has only these."""
        if ranks == self.placement.ranks:
            return
        self.placement, self._rank = self._place(self.placement.experts, ranks), rank
        self.experts.keep(self.placement.held_by(rank))  # pyright: ignore[reportCallIssue]
        self.inlet.slot_of.copy_(torch.tensor(self.placement.slot_of))

    def divide(self, name: str, group: Group, grain: Grain) -> Divided:
        """The layer in three, of which the middle works over the ranks of `group`."""
        if (chunks := max(grain.forward, grain.backward)) > self.placement.per_rank:
            raise PipeSwiftError(
                f"expert_chunks = {chunks}, but layer {name} has {self.placement.per_rank} of its "
                f"{self.placement.experts} experts on each of {group.size} ranks, and chunks are groups of these: use "
                f"{self.placement.per_rank} at most"
            )
        held = self.placement.per_rank
        self.inlet.dispatch = Dispatch(self._rank * held, (self._rank + 1) * held, self._payload)
        middle = ExpertExchange(name, self.experts, self.shared, held, group, grain, self._payload)
        return Divided(self.inlet, middle, self.outlet)

    def report(self, auxiliary: Auxiliary, name: str) -> None:
        """Losses and figures of its forwards go there from now on, under that name.

        sums: "rows", (experts,), how many assignments chose each expert; "dropped", how many of them found no room;
            where ranks share out experts, "taken", (ranks,), how many assignments go to experts of each, and "sent" and
            "saved", bytes that dispatches sent and that the payload saved.
        means: "balance" and "z", the losses without their coefficients.
        """
        self.inlet.told = auxiliary, name
        auxiliary.losses |= any(self.inlet.coefficients)

    def _place(self, experts: int, ranks: int) -> Placement:
        return contiguous(experts, ranks) if self._arrangement == "contiguous" else shuffled(experts, ranks, self._seed)


def _check(capacity_factor: float | None, overflow: str, placement: str, payload: str) -> None:
    if capacity_factor is not None and not capacity_factor > 0:
        raise PipeSwiftError(f"capacity_factor = {capacity_factor} is not above 0: use 1.25, or None to drop no token")
    if overflow not in OVERFLOWS:
        raise PipeSwiftError(f'overflow = {overflow!r} is neither "drop" nor "residual": use "drop"')
    if placement not in ARRANGEMENTS:
        raise PipeSwiftError(f'placement = {placement!r} is neither "contiguous" nor "random": use "contiguous"')
    if payload not in PAYLOADS:
        raise PipeSwiftError(f'payload = {payload!r} is neither "full" nor "bfloat16": use "full"')


def _feed_forward(width: int, hidden: int, scale: float) -> nn.Module:
    up, down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
    nn.init.normal_(up.weight, std=width**-0.5)
    nn.init.normal_(down.weight, std=scale * hidden**-0.5)
    return nn.Sequential(up, nn.GELU(approximate="tanh"), down)


def _by_token(rows: Tensor, gates: Tensor, order: Tensor, top_k: int, like: Tensor) -> Tensor:
    """For each token the sum over its rows, weighted; of the shape of `like`. The sum has a fixed order."""
    width = rows.shape[-1]
    tokens = like.numel() // width
    placed = rows.new_zeros(top_k * tokens, width).index_copy(0, order, rows * gates.unsqueeze(-1))
    return placed.view(top_k, tokens, width).sum(0).view_as(like)
