"""A mixture of experts written out token by token, to compare with; it shares no code with pipeswift.moe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def moe(layer: Any, x: Tensor, *, room: int | None = None, residual: bool = False) -> tuple[Tensor, Tensor]:
    """(y, auxiliary loss) of an `MoE` with all its experts here, by loops over tokens and choices."""
    router, k = layer.inlet.router, layer.inlet.router.top_k
    normed = layer.inlet.norm(x).flatten(0, -2)
    logits = normed @ router.weight.t()
    scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
    best = scores.topk(k).indices
    filled = [0] * len(router.weight)
    added = [torch.zeros(x.shape[-1]) for _ in normed]
    for choice in range(k):
        for token, vector in enumerate(normed):
            expert = int(best[token, choice])
            gate = scores[token, expert]
            if k > 1:
                gate = gate / sum(scores[token, int(other)] for other in best[token])
            filled[expert] += 1
            if room is None or filled[expert] <= room:
                made = _expert(layer, expert, vector)
            else:
                made = vector if residual else torch.zeros_like(vector)
            added[token] = added[token] + gate * made
    y = x + torch.stack(added).view_as(x)
    if layer.shared is not None:
        y = y + layer.shared(normed).view_as(x)
    shares = scores / scores.sum(-1, keepdim=True)
    used = torch.tensor(filled) / (k * len(normed))
    balance = len(filled) * (used * shares.mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    weights = layer.inlet.coefficients
    return y, weights[0] * balance + weights[1] * z


def _expert(layer: Any, expert: int, vector: Tensor) -> Tensor:
    up, down = getattr(layer.experts, f"up{expert}"), getattr(layer.experts, f"down{expert}")
    return functional.gelu(vector @ up, approximate="tanh") @ down
