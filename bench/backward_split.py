"""What cutting the backward in two costs and frees: our I + W against a fused B, and torch's split beside them.

    .venv/bin/python bench/backward_split.py [--json FILE] [--rounds N]

Four transformer blocks (width 256) on one thread. Ours runs as a one-stage pipeline's stage would; torch's is the split
of torch.distributed.pipelining. Times are medians over rounds in which all of them take turns; freed memory stays with
the process, as an accelerator's does. The second table shows the bytes of activations that stay alive after F, after I
and after W, beside what W needs: the inputs of the products and their gradients; once more with every block
checkpointed. The third shows what running the W of four micro-batches as one brings.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

import harness
from pipeswift.runtime.backward import attach
from pipeswift.runtime.engine import run_backward
from pipeswift.runtime.footprint import LiveBytes
from pipeswift.runtime.ledger import Ledger
from pipeswift.runtime.pending import Pending, joined, weight_gradients
from pipeswift.train.model import Block

WIDTH, BLOCKS, LENGTH = 256, 4, 128
# For glibc, which else gives freed memory back to the system, and whose pass it takes to get it again is chance.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
TOGETHER = 4  # micro-batches whose W run as one


class Times(NamedTuple):
    """Seconds of the passes of one micro-batch; `backward` is I + W, or B."""

    forward: float
    backward: float


def stack(length: int = LENGTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 8, length, scale=0.3) for _ in range(BLOCKS)))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    start = perf_counter()
    result = call()
    return perf_counter() - start, result


def fused(model: nn.Module, x: Tensor, gradient: Tensor) -> Times:
    forward, y = clocked(lambda: model(x))
    backward, _ = clocked(lambda: y.backward(gradient))
    return Times(forward, backward)


class Ours:
    """The stack as a stage of a schedule that splits the backward."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model, self.ledger = model or stack(), Ledger()
        attach(self.model, self.ledger)

    def __call__(self, x: Tensor, gradient: Tensor) -> Times:
        forward, y = clocked(lambda: get_gradient_edge(self.model(x)))
        first, pendings = clocked(lambda: self.input_gradient(y, gradient))
        second, _ = clocked(lambda: weight_gradients(pendings))
        return Times(forward, first + second)

    def input_gradient(self, y: Any, gradient: Tensor) -> list[Any]:
        with self.ledger.leaving(None, (y,)) as pendings:
            run_backward((y,), (gradient,))
        return pendings


def torch_split(model: nn.Module, x: Tensor, gradient: Tensor) -> Times:
    forward, y = clocked(lambda: model(x))
    first, (_, groups) = clocked(lambda: stage_backward_input([y], [gradient], [x], model.parameters()))
    second, _ = clocked(lambda: stage_backward_weight(model.parameters(), groups))
    return Times(forward, first + second)


def batch(samples: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    shape = (samples, length, WIDTH)
    return torch.randn(shape).requires_grad_(), torch.randn(shape)


def times(rank: int, world: int, samples: int, rounds: int) -> dict[str, list[Times]]:
    plain, theirs, ours = stack(), stack(), Ours()
    systems = {
        "fused": lambda *b: fused(plain, *b),
        "ours": ours,
        "torch": lambda *b: torch_split(theirs, *b),
    }
    results: dict[str, list[Times]] = {name: [] for name in systems}
    for round_ in range(rounds + 2):
        for name, system in systems.items():
            measured = system(*batch(samples))
            if round_ > 1:
                results[name].append(measured)
    return results


def batched(rank: int, world: int, tokens: int, rounds: int) -> list[tuple[float, float]]:
    """(seconds of the W of several micro-batches one after another, seconds of them as one)."""
    ours = Ours(stack(tokens))
    results = []
    for round_ in range(rounds + 2):
        seconds = []
        for form in (one_by_one, as_one) if round_ % 2 else (as_one, one_by_one):
            left: list[list[Pending]] = []
            for _ in range(TOGETHER):
                x, gradient = batch(1, tokens)
                left.append(ours.input_gradient(get_gradient_edge(ours.model(x)), gradient))
            seconds.append(clocked(partial(form, left))[0])
        results.append(tuple(seconds if round_ % 2 else seconds[::-1]))
    return results[2:]


def one_by_one(left: list[list[Pending]]) -> None:
    for pendings in left:
        weight_gradients(pendings)


def as_one(left: list[list[Pending]]) -> None:
    weight_gradients(joined([pending for pendings in left for pending in pendings]))


def alive(rank: int, world: int, samples: int, checkpointed: bool) -> dict[str, int]:
    """Bytes of tensors alive after each pass, beyond weights, their gradients, and the batch."""
    ours = Ours(nn.Sequential(*map(Checkpointed, stack())) if checkpointed else None)
    for parameter in ours.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, gradient = batch(samples)
    with LiveBytes() as live:
        y = get_gradient_edge(ours.model(x))
        after_f = live.bytes()
        pendings = ours.input_gradient(y, gradient)
        del y
        x.grad = None
        after_i = live.bytes()
        kept = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for p in pendings for t in (p.x, p.gradient)
        }
        needs = sum(size for address, size in kept.items() if address not in (_address(x), _address(gradient)))
        weight_gradients(pendings)
        del pendings
        return {"after F": after_f, "after I": after_i, "what W needs": needs, "after W": live.bytes()}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    os.environ |= KEEPS_MEMORY
    table: list[dict[str, Any]] = []
    for samples in (1, 4, 8):
        (results,) = harness.launch(times, samples, options.rounds, world=1)
        fused_backward = median(t.backward for t in results["fused"])
        line: dict[str, Any] = {"samples": samples, "F ms": 1e3 * median(t.forward for t in results["fused"])}
        line |= {"B ms": 1e3 * fused_backward}
        for name in ("ours", "torch"):
            line[f"{name} (I+W)/B"] = median(
                split.backward / whole.backward for split, whole in zip(results[name], results["fused"], strict=True)
            )
        line["ours F/F"] = median(t.forward for t in results["ours"]) / median(t.forward for t in results["fused"])
        harness.print_row(line, header=not table)
        table.append(line)
    print()
    for samples, checkpointed in product((1, 4, 8), (False, True)):
        (sizes,) = harness.launch(alive, samples, checkpointed, world=1)
        line = {"samples": samples, "checkpointed": checkpointed}
        line |= {f"{name}, MB": size / 1e6 for name, size in sizes.items()}
        harness.print_row(line, header=samples == 1 and not checkpointed)
        table.append(line)
    print()
    for tokens in (4, 16, 64, 256):
        (pairs,) = harness.launch(batched, tokens, options.rounds, world=1)
        line = {"tokens": tokens, f"W x {TOGETHER} ms": 1e3 * median(single for single, _ in pairs)}
        line["as one / singly"] = median(one / single for single, one in pairs)
        harness.print_row(line, header=tokens == 4)
        table.append(line)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
