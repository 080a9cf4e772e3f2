"""The router: which experts see which token, with which weight, and the losses that keep it honest."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeswift.errors import PipeSwiftError
from pipeswift.moe.skew import Skew
from pipeswift.runtime.keyed import draw_by_sample, place_on

Scoring = Literal["softmax", "sigmoid"]
SCORINGS = ("softmax", "sigmoid")


class Choice(NamedTuple):
    """What a router has decided for T tokens.

    experts, gates: (T, k), the best expert first; gates carry the router's gradient. balance, z: the losses, scalars.
    """

    experts: Tensor
    gates: Tensor
    balance: Tensor
    z: Tensor


class Router(nn.Module):
    """Sends each token to its `top_k` best experts of `experts`; computes in float32 at least.

    scoring: "softmax" over experts, or "sigmoid" for each by itself (DeepSeek-AI 2024, DeepSeek-V3, sec. 2.1.2). With
        top_k > 1 a token's gates sum to 1; with 1 the gate is the score, or else the router would get no gradient.
    jitter: while training, inputs are multiplied by numbers from 1 - jitter to 1 + jitter (Fedus et al. 2021, Switch
        Transformers, sec. 2.4), keyed by sample: the same in a recomputation, and whatever the number of micro-batches.
    skew: for experiments, a bias that makes loads uneven.
    """

    keyed = True  # asks the runtime to say which step, micro-batch and sample is which

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        scoring: Scoring = "softmax",
        jitter: float = 0.0,
        skew: Skew | None = None,
    ):
        super().__init__()
        if not 1 <= top_k <= experts:
            raise PipeSwiftError(f"top_k = {top_k} is none of 1 to the number of experts, {experts}: use 1 or 2, say")
        if scoring not in SCORINGS:
            raise PipeSwiftError(f'scoring = {scoring!r} is neither "softmax" nor "sigmoid": use "softmax"')
        if not 0.0 <= jitter < 1.0:
            raise PipeSwiftError(f"jitter = {jitter} is no number from 0 up to, but not including, 1: use 0.01, say")
        self.top_k, self.scoring, self.jitter, self.skew = top_k, scoring, jitter, skew
        self.weight = nn.Parameter(torch.empty(experts, width))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Choice:
        """x: (samples, ..., width); the tokens are its rows in their order."""
        if self.jitter and self.training:
            low, high = 1.0 - self.jitter, 1.0 + self.jitter
            x = x * draw_by_sample(x, lambda part, generator: part.uniform_(low, high, generator=generator))
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.flatten(0, -2).to(dtype), self.weight.to(dtype))
        if self.skew is not None:
            logits = self.skew.apply(logits, place_on(x.device))
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        gates, experts = scores.topk(self.top_k)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        shares = scores if self.scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
        return Choice(experts, gates, _balance(shares, experts), logits.logsumexp(-1).square().mean())

    def extra_repr(self) -> str:
        experts, width = self.weight.shape
        return f"{width}, {experts}, top_k={self.top_k}, scoring={self.scoring}, jitter={self.jitter:g}"


def _balance(shares: Tensor, experts: Tensor) -> Tensor:
    """E sum over experts of (share of the assignments) (mean score); 1 when even (Fedus et al. 2021, sec. 2.2)."""
    counts = torch.bincount(experts.flatten(), minlength=shares.shape[-1])
    return shares.shape[-1] * (counts / experts.numel() * shares.mean(0)).sum()


def capacity(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """How many rows an expert may get when each may have `factor` times an even share."""
    return math.ceil(factor * tokens * top_k / experts)
