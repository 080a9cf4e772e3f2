import os
import subprocess
import sys

import pytest

from pipeswift import __version__
from pipeswift.cli import policy


def process(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "pipeswift", *arguments], text=True, stderr=subprocess.PIPE, **options)


def test_without_a_command_it_shows_what_there_is(pipeswift):
    code, out, err = pipeswift()
    assert (code, err) == (0, "")
    assert all(command in out for command in ("schedules", "simulate", "compare", "verify"))


def test_version(pipeswift):
    assert pipeswift("--version") == (0, __version__ + "\n", "")


def test_an_unknown_command_names_the_nearest(pipeswift):
    assert pipeswift("verif") == (2, "", "error: No such command 'verif'. Did you mean 'verify'?\n")


def test_an_unknown_option_names_the_nearest(pipeswift):
    code, _, err = pipeswift("simulate", "1f1b", "--microbatch", 8)
    assert code == 2
    assert err == "error: No such option: --microbatch (Possible options: --microbatches)\n"


def test_a_missing_argument_is_named(pipeswift):
    assert pipeswift("verify") == (2, "", "error: Missing argument 'FILE'.\n")


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_shows_the_traceback_wherever_it_stands(place):
    words = ["simulate", "1f1c", "--pp=4"]
    words.insert(place, "--debug")
    ran = process(*words)
    assert ran.returncode == 1
    assert ran.stderr.startswith("Traceback")


@pytest.mark.parametrize(("words", "code"), [(["simulate", "1f1c", "--pp=4"], 1), (["simulat"], 2)])
def test_an_error_of_the_users_is_one_message_without_a_traceback(words, code):
    ran = process(*words)
    assert ran.returncode == code
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1


def test_ctrl_c_is_quiet(pipeswift, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(policy, "replay", interrupted)
    assert pipeswift("simulate", "1f1b", "--pp", 2, "--microbatches", 2) == (130, "", "")


@pytest.mark.parametrize("microbatches", ["2", "3000"])
def test_a_reader_that_leaves_is_no_error(microbatches):
    """Both while writing and when the rest is flushed at the end."""
    read, write = os.pipe()
    os.close(read)
    try:
        ran = process("simulate", "1f1b", "--pp", "4", "--microbatches", microbatches, "--csv", "-", stdout=write)
    finally:
        os.close(write)
    assert (ran.returncode, ran.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_behind_standard_output_is_one_message():
    with open("/dev/full", "w") as full:
        ran = process("schedules", stdout=full)
    assert ran.returncode == 1
    assert ran.stderr == "error: [Errno 28] No space left on device\n"


def test_simulating_loads_neither_torch_nor_matplotlib_nor_rich():
    code = (
        "import sys; from pipeswift.cli import main\n"
        "main(['simulate', '1f1b', '--pp=2', '--microbatches=2', '--json=-'])\n"
        "print(sorted({'torch', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_listing_schedules_does_not_wait_for_numba():
    code = "import sys; from pipeswift.cli import main; main(['schedules']); print('numba' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"
