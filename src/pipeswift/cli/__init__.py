"""The command line: one file per command group; errors of the user's are one message, without a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from pipeswift import __version__
from pipeswift.cli import compare, partition, profile, schedules, search, simulate, simulate_moe, train, verify
from pipeswift.errors import PipeSwiftError

INTERRUPTED = 130

app = typer.Typer(
    name="pipeswift",
    help="Pipeline-parallel training for PyTorch: plan it, run it, see it.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(schedules.schedules)
app.command()(simulate.simulate)
app.command()(simulate_moe.simulate_moe)
app.command()(compare.compare)
app.command()(search.search)
app.command()(verify.verify)
app.command()(profile.profile)
app.command()(partition.partition)
app.command()(train.train)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def command() -> NoReturn:
    """The `pipeswift` command."""
    code = main()
    if code == INTERRUPTED:
        # An interrupted run leaves threads of torch's launcher behind; taking the interpreter down around them has
        # ended in an abort.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C.

    arguments: without the program's name; None for those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"] or ["--help"]
    try:
        code = app(words, prog_name="pipeswift", standalone_mode=False, obj=debug)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left. Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except (PipeSwiftError, typer.TyperException, OSError) as error:
        if debug:
            raise
        print(f"error: {_message(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return code or 0


def _message(error: Exception) -> str:
    return error.format_message() if isinstance(error, typer.TyperException) else str(error)
