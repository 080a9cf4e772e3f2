"""What benchmarks share: starting ranks as processes, and printing a table row by row."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Loopback:
    """The network of ranks that share this machine's own."""

    def enter(self, rank: int) -> str:
        """Called in a rank's process before it talks to anybody; returns the name of its interface."""
        return "lo"


def launch(
    function: Callable[..., Any], *args: Any, world: int, threads: int = 1, network: Loopback | None = None
) -> list[Any]:
    """What `function(rank, world, *args)` returns on each of `world` new processes joined by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_serve, (function, world, args, threads, folder, network or Loopback()), nprocs=world)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _serve(
    rank: int,
    function: Callable[..., Any],
    world: int,
    args: tuple,
    threads: int,
    folder: str,
    network: Loopback,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = network.enter(rank)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    result = function(rank, world, *args)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def print_row(row: dict[str, Any], header: bool) -> None:
    """Prints one line of a table whose columns are the keys of `row`."""
    if header:
        print("  ".join(f"{name:>16}" for name in row), flush=True)
    cells = (f"{value:>16.4g}" if isinstance(value, float) else f"{value!s:>16}" for value in row.values())
    print("  ".join(cells), flush=True)
