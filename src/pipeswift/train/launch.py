"""Starts one local process per rank, and ends them all when one fails or the user interrupts."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipeswift.errors import PipeSwiftError
from pipeswift.train import worker
from pipeswift.train.config import Config


class RankFailed(PipeSwiftError):
    """A rank of a local run ended with an error."""


def launch(config: Config, *, debug: bool = False) -> None:
    """Train with `pipeline.pp` x `pipeline.dp` processes on this machine, and wait for them.

    Raises RankFailed with what the first rank to fail said, and KeyboardInterrupt after Ctrl-C; no process is left.
    debug: lets torch's launcher log what it does, and adds the failed rank's traceback.
    """
    os.environ["OMP_NUM_THREADS"] = str(config.pipeline.threads)
    logging.disable(logging.NOTSET if debug else logging.CRITICAL)  # torch's launcher reports failures at length
    with tempfile.TemporaryDirectory(prefix="pipeswift-") as folder:
        try:
            elastic_launch(_how(config, folder), _rank)(config)
        except ChildFailedError as error:
            raise RankFailed(_first_failure(Path(folder), error, debug)) from None
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RankFailed(f"the run was ended by {stop.sigval.name}") from None
        finally:
            logging.disable(logging.NOTSET)


def _how(config: Config, folder: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.pipeline.pp * config.pipeline.dp,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # any free port
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )


def _rank(config: Config) -> None:
    """The whole life of one process."""
    # A rank waits for messages in threads that cannot be interrupted: at once is the only way to end in order.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        worker.run(config)
    except Exception as error:
        get_error_handler().record_exception(error)
        os._exit(1)


def _first_failure(folder: Path, error: ChildFailedError, debug: bool) -> str:
    """What the rank that failed first said; torch's own choice is the one it noticed first, often a victim."""
    rank, failure = error.get_first_failure()
    said = {int(file.parent.name): json.loads(file.read_text())["message"] for file in folder.rglob("error.json")}
    if not said:
        return f"rank {rank} ended with exit code {failure.exitcode}"
    rank = min(said, key=lambda rank: float(said[rank]["extraInfo"]["timestamp"]))
    text = f"rank {rank} failed: {said[rank]['message'].removeprefix('PipeSwiftError: ')}"
    return f"{text}\n{said[rank]['extraInfo']['py_callstack']}" if debug else text
