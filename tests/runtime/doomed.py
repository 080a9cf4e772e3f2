"""A training run in which one rank comes to harm: `python -m tests.runtime.doomed VICTIM PLACE HARM`, one per rank.

VICTIM: a rank. PLACE: start, connecting, connected, build, forward, backward, optimizer, between (steps), experts (of
a layer that all ranks share out), word (its next decision, where all ranks share out experts), or what it does unlike
the others: evaluate (which it enters alone), microbatches (another number) or targets (too few). COPIES, in the
environment: train without flush, with so many ranks per stage.
HARM: kill, stop, raise, sleep (for good), pause (every rank, for longer than the watchdog's patience) or none.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeswift.moe import MoE
from pipeswift.policy import Swift
from pipeswift.runtime import Pipeline, init_mesh
from pipeswift.runtime.optimizer import Optimizer
from pipeswift.runtime.parley import Parley
from pipeswift.schedules import pipedream

PATIENCE = float(os.environ["PATIENCE"])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VICTIM, PLACE, HARM = int(sys.argv[1]), sys.argv[2], sys.argv[3]
COPIES = [int(count) for count in os.environ.get("COPIES", "").split()]
STEPS, LATE = 3, 2  # it happens in the second step, unless it happens before the first

step = -1  # that is, not yet; 0 until the first one


def reach(place: str) -> None:
    """Does the harm, when this is the place and the step for it."""
    if place != PLACE or step not in (0, LATE):
        return
    if HARM == "pause":
        time.sleep(1.5 * PATIENCE)
    elif RANK == VICTIM:
        print(f"harm at {time.monotonic()}", flush=True)
        if HARM == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif HARM == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif HARM == "raise":
            raise ValueError("a bad number")
        elif HARM == "sleep":
            time.sleep(600)


class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        reach("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        reach("backward")
        return gradients[0]


class Layer(nn.Linear):
    def __init__(self) -> None:
        reach("build")
        super().__init__(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        return Fragile.apply(super().forward(input))


class Gate(nn.LayerNorm):
    """The norm of a layer with experts: what comes next is the first all-to-all."""

    def forward(self, input: Tensor) -> Tensor:
        reach("experts")
        return super().forward(input)


def layer_with_experts() -> nn.Module:
    return MoE(4, experts=WORLD, hidden=4, top_k=1, norm=Gate(4))


class Descent:
    """Not one of torch's optimizers: the first step of those loads modules for seconds."""

    def __init__(self, parameters: list[Tensor], lr: float):
        self._parameters, self._lr = parameters, lr

    def step(self) -> None:
        reach("optimizer")
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.sub_(cast(Tensor, parameter.grad), alpha=self._lr)


def main() -> None:
    global step
    torch.set_num_threads(1)
    Layer()(torch.ones(1, 4)).sum().backward()  # torch loads modules when they are first needed, for seconds
    step = 0
    reach("start")
    connect = dist.init_process_group
    dist.init_process_group = lambda *args, **settings: (reach("connecting"), connect(*args, **settings))
    shared_out = PLACE in ("experts", "word")
    sizes = {"pp": 1, "ep": WORLD} if shared_out else {"pp": WORLD}
    layers = [layer_with_experts] if shared_out else [Layer] * WORLD
    mesh = init_mesh(**sizes, timeout=float(os.environ.get("START", "60")))
    reach("connected")
    agreed = Parley.due
    cast(Any, Parley).due = lambda parley: (reach("word"), agreed(parley))[1]
    order: Any = {"microbatches": 4, "policy": Swift if PLACE == "word" else "follow"}
    if COPIES:
        order = {"schedule": pipedream(WORLD, 4, COPIES), "updates_every": 2}
    pipe = Pipeline(layers, loss=lambda y, _: y.mean(), mesh=mesh, watchdog=PATIENCE, **order)
    optimizer = (pipe.async_optimizer if COPIES else pipe.optimizer)(cast(Any, Descent), lr=0.1)
    for step in range(1, STEPS + 1):
        reach("between")
        if PLACE == "evaluate" and RANK == VICTIM:
            print(f"harm at {time.monotonic()}", flush=True)
            pipe.evaluate(torch.ones(8, 4), torch.zeros(8))
        odd = PLACE if RANK == VICTIM and step == LATE else ""
        if odd in ("microbatches", "targets"):
            print(f"harm at {time.monotonic()}", flush=True)
        inputs = torch.ones(8, 4) if 0 in pipe.stages else None
        targets = torch.zeros(6 if odd == "targets" else 8) if RANK == WORLD - 1 or shared_out else None
        pipe.step(inputs, targets, microbatches=2 if odd == "microbatches" else None)
        if isinstance(optimizer, Optimizer):
            optimizer.step()
    pipe.close()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    print(f"threads left: {left}", flush=True)


if __name__ == "__main__":
    main()
