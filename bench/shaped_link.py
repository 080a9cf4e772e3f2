"""A slow network on one machine: a network namespace per rank, joined by a bridge, each rank's sending held to a rate.

    sudo .venv/bin/python bench/shaped_link.py [--ranks N] [--mbit RATE]    # makes one, measures it, removes it

Needs Linux, root, and `ip` and `tc` of iproute2, and says so where one is missing. The rate is held by htb with a burst
of a few packets, so that short messages are held to it as well. All names carry the process's id, and all is removed at
the end, after an error too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from harness import Loopback, launch, print_row

_CLONE_NEWNET = 0x40000000
_INTERFACE = "link0"


@dataclass(frozen=True)
class ShapedLink(Loopback):
    """A context in which `ranks` namespaces exist; a rank sends at most `mbit` Mbit/s."""

    ranks: int
    mbit: float
    name: str = field(default_factory=lambda: f"ps{os.getpid()}")

    def enter(self, rank: int) -> str:
        with open(f"/run/netns/{self._namespace(rank)}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace of rank {rank}")
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


def exchange(sizes: list[int], repeat: int, group: dist.ProcessGroup | None = None) -> dict[int, float]:
    """Median seconds of an all-to-all, by the bytes that leave each rank; the slowest rank's, on every rank.

    group: of those that talk to each other; other groups do the same at that time.
    """
    world = dist.get_world_size(group)
    found = {}
    for size in sizes:
        sent = torch.zeros(world, max(size // (4 * (world - 1)), 1))
        received, times = torch.empty_like(sent), []
        for _ in range(repeat + 1):
            dist.barrier()
            start = perf_counter()
            dist.all_to_all_single(received, sent, group=group)
            times.append(perf_counter() - start)
        seconds = torch.tensor([median(times[1:])], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found[size] = seconds.item()
    return found


def _measure(rank: int, world: int) -> dict[int, float]:
    return exchange([64, 1 << 16, 1 << 18, 1 << 20, 1 << 22], repeat=7)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a shaped link, measures all-to-alls over it, and removes it.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=100.0)
    arguments = parser.parse_args()
    with ShapedLink(arguments.ranks, arguments.mbit) as link:
        times = launch(_measure, world=link.ranks, network=link)[0]
    for index, (size, seconds) in enumerate(times.items()):
        row = {"bytes sent": size, "ms": 1e3 * seconds, "Mbit/s": 8e-6 * size / seconds}
        print_row(row, header=index == 0)


if __name__ == "__main__":
    main()
