"""The command line, called in this process."""

from typing import NamedTuple

import pytest

from pipeswift.cli import main


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def pipeswift(capsys):
    """`pipeswift("simulate", "1f1b", ...)` gives exit code, standard output and standard error."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        return Answer(code, *capsys.readouterr())

    return call
