"""A slow network on one machine: a host of its own for each rank, as far as it can see, its sending held to a rate.

    sudo .venv/bin/python bench/shaped_link.py [--ranks N] [--mbit RATE]    # makes one, measures it, removes it

A rank has a network namespace, joined to the others by a bridge, and a host name. Needs Linux, root, and `ip` and `tc`
of iproute2, and says so where one is missing. The rate is held by htb with a burst of a few packets, so that short
messages are held to it as well. All names carry the process's id, and all is removed at the end, after an error too.

The table has all-to-alls by the bytes that leave each rank, from the last rank's start to the last one's end, medians;
as the runtime does them, and gloo's own; ranks come to them together, or up to 4 ms apart.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from harness import Loopback, launch, print_row
from pipeswift.rehearse.kernels import sleep_until
from pipeswift.runtime.groups import Group

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_INTERFACE = "link0"


@dataclass(frozen=True)
class ShapedLink(Loopback):
    """A context in which `ranks` namespaces exist; a rank sends at most `mbit` Mbit/s."""

    ranks: int
    mbit: float
    name: str = field(default_factory=lambda: f"ps{os.getpid()}")

    def enter(self, rank: int) -> str:
        name, libc = self._namespace(rank), ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{name}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace of rank {rank}")
        socket.sethostname(name)
        return _INTERFACE

    def __enter__(self) -> ShapedLink:
        check()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _namespace(self, rank: int) -> str:
        return f"{self.name}-{rank}"

    def _make(self) -> None:
        _run(f"ip link add {self.name} type bridge")
        _run(f"ip link set {self.name} up")
        for rank in range(self.ranks):
            space, near = self._namespace(rank), f"{self.name}p{rank}"
            _run(f"ip netns add {space}")
            _run(f"ip link add {near} type veth peer name {_INTERFACE} netns {space}")
            _run(f"ip link set {near} master {self.name} up")
            _run(f"ip -n {space} addr add 10.83.0.{rank + 1}/24 dev {_INTERFACE}")
            _run(f"ip -n {space} link set lo up")
            _run(f"ip -n {space} link set {_INTERFACE} up")
            _run(f"ip -n {space} route add default dev {_INTERFACE}")
            # The kernel lets a packet go as soon as the one before is paid for, and these grow to 64 KB where they may.
            _run(f"ip -n {space} link set {_INTERFACE} gso_max_size 8192")
            _run(f"tc -n {space} qdisc add dev {_INTERFACE} root handle 1: htb default 1")
            rate = f"rate {self.mbit}mbit ceil {self.mbit}mbit burst 4k cburst 4k"
            _run(f"tc -n {space} class add dev {_INTERFACE} parent 1: classid 1:1 htb {rate}")

    def _remove(self) -> None:
        for rank in range(self.ranks):
            subprocess.run(["ip", "netns", "delete", self._namespace(rank)], capture_output=True)
        subprocess.run(["ip", "link", "delete", self.name], capture_output=True)


def check() -> None:
    """Exits with a sentence where a shaped link cannot be made."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if sys.platform != "linux":
        sys.exit("a shaped link needs Linux: its network namespaces and traffic control")
    if missing:
        sys.exit(f"a shaped link needs {' and '.join(missing)} of iproute2: install that package")
    if os.geteuid():
        sys.exit("a shaped link needs root, to make network namespaces: run this with sudo")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")


AllToAll = Callable[[Tensor, Tensor, dist.ProcessGroup], None]


def posted(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """As the runtime does it."""
    group = group or dist.group.WORLD
    assert group is not None
    Group(group.rank(), group.size(), group).all_to_all(received, sent)


def own(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """gloo's own."""
    dist.all_to_all_single(received, sent, group=group)


def exchange(
    sizes: Sequence[int],
    repeat: int,
    group: dist.ProcessGroup | None = None,
    run: AllToAll = posted,
    apart: float = 0.0,
) -> dict[int, float]:
    """Median seconds of an all-to-all, by the bytes that leave each rank, from the last start to the last end.

    group: of those that talk to each other; other groups do the same at that time. apart: seconds, up to which, at
    random, each rank comes late. On every rank the figures of the slowest group.
    """
    group = group or dist.group.WORLD
    assert group is not None
    world, delays = dist.get_world_size(group), Random(dist.get_rank())
    found = {}
    for size in sizes:
        sent = torch.zeros(world, max(size // (4 * (world - 1)), 1))
        received, times = torch.empty_like(sent), []
        for _ in range(repeat + 1):
            dist.barrier(group)
            sleep_until(perf_counter() + apart * delays.random())
            start = perf_counter()
            run(received, sent, group)
            edges = torch.tensor([start, perf_counter()], dtype=torch.float64)  # of one machine, so of one clock
            dist.all_reduce(edges, dist.ReduceOp.MAX, group=group)
            times.append(edges[1].item() - edges[0].item())
        seconds = torch.tensor([median(times[1:])], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found[size] = seconds.item()
    return found


def _measure(rank: int, world: int) -> dict[str, dict[int, float]]:
    ways = {"": posted, "gloo's ": own}
    sizes = [64, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
    return {
        f"{name}{when}": exchange(sizes, 15, run=run, apart=seconds)
        for name, run in ways.items()
        for when, seconds in (("together", 0.0), ("apart", 4e-3))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a shaped link, measures all-to-alls over it, and removes it.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=100.0)
    arguments = parser.parse_args()
    with ShapedLink(arguments.ranks, arguments.mbit) as link:
        times = launch(_measure, world=link.ranks, network=link)[0]
    for index, size in enumerate(next(iter(times.values()))):
        row = {f"{name}, ms": 1e3 * seconds[size] for name, seconds in times.items()}
        print_row({"bytes": size, **row}, header=index == 0)


if __name__ == "__main__":
    main()
