"""The live versions of one stage's weights, and which of them its layers run on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor, nn

from pipeswift.ir import Op
from pipeswift.runtime.ledger import Ledger
from pipeswift.runtime.recorder import clock
from pipeswift.runtime.weights import Weights
from pipeswift.trace import Counter
from pipeswift.versions import Versions, counter_name


class Version:
    """The parameters of a stage, by global name, as they were at one moment; gradients gather in their `.grad`.

    Copies of what is trained, so that the optimizer may change its own in place; what is frozen is shared.
    """

    __slots__ = ("__weakref__", "leaves")

    def __init__(self, master: Weights):
        self.leaves = {
            name: nn.Parameter(leaf.detach().clone()) if leaf.requires_grad else leaf
            for name, leaf in master.leaves.items()
        }


class Shelf:
    """Keeps the versions of a stage while an order runs that updates as it goes.

    A version is put into the layers as their parameters and stays there until the next pass puts in another, so it is
    there throughout a backward as well, where checkpointing runs forwards again.
    """

    def __init__(self, stage: int, layers: Iterable[nn.Module], master: Weights, ledger: Ledger | None):
        self._stage, self._master, self._ledger = stage, master, ledger
        names = {id(leaf): name for name, leaf in master.leaves.items()}
        self._slots = [
            (module, attribute, names[id(leaf)])
            for layer in layers
            for module in layer.modules()
            for attribute, leaf in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._bound: Version | Weights = master
        self.live: dict[int, Version] = {}

    def begin(self, plan: Versions, rank: int) -> None:
        """An order starts: the optimizer's weights become the first version."""
        self._forward, self._backward = (uses[self._stage].tolist() for uses in (plan.forward, plan.backward))
        mine = [life for life in plan.lives if (life.rank, life.stage) == (rank, self._stage)]
        self._births = {life.born: life.version for life in mine}
        self._deaths: dict[int, list[int]] = {}
        for life in mine:
            self._deaths.setdefault(life.dies, []).append(life.version)
        self._log: list[tuple[float, int]] = []
        self.publish(-1)

    def end(self) -> None:
        """The layers have the optimizer's weights again."""
        self._put(self._master)
        self.live.clear()
        if self._ledger is not None:
            self._ledger.stand_ins = {}

    def bind(self, op: Op, microbatch: int) -> None:
        """From here on the layers run on the version that this pass uses."""
        forward = self.live[self._forward[microbatch]]
        if op is Op.F:
            self._put(forward)
            return
        backward = self.live[self._backward[microbatch]]
        self._put(backward)
        if self._ledger is not None:
            pairs = zip(forward.leaves.values(), backward.leaves.values(), strict=True)
            self._ledger.stand_ins = {id(old): new for old, new in pairs}

    def gradients(self, microbatch: int) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of what the micro-batch's last pass has added; takes it off the version."""
        for number in dict.fromkeys((self._forward[microbatch], self._backward[microbatch])):
            for name, leaf in self.live[number].leaves.items():
                if leaf.grad is not None:
                    yield name, leaf.grad
                    leaf.grad = None

    def release(self, microbatch: int) -> None:
        """The micro-batch's last pass here has ended, and with it the versions that nobody uses after it."""
        for number in self._deaths.get(microbatch, ()):
            if self.live.pop(number) is self._bound:
                self._put(self._master)

    def publish(self, microbatch: int) -> None:
        """The micro-batch's last pass here has ended: the next version, if it is due and used, is there."""
        if microbatch in self._births:
            self.live[self._births[microbatch]] = Version(self._master)
        if microbatch in self._births or microbatch in self._deaths:
            self._log.append((clock(), len(self.live)))

    def counter(self, rank: int) -> Counter:
        """How many versions were alive, and when."""
        times, live = np.array(self._log).reshape(-1, 2).T
        return Counter(counter_name(self._stage), rank, times, live.astype(np.int64))

    def _put(self, version: Version | Weights) -> None:
        if version is not self._bound:
            self._bound = version
            for module, attribute, name in self._slots:
                setattr(module, attribute, version.leaves[name])
