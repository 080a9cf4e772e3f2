import pytest


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_schedule_that_may_run(pipeswift, file):
    assert pipeswift("verify", file("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")) == (
        0,
        "ok: mine, 2 ranks, 2 micro-batches, 8 actions\n"
        "    every pass is there once and in order; no deadlock with a receive pool of 2\n"
        "    peak activations per rank: 2 1\n",
        "",
    )


def test_every_violation_is_said(pipeswift, file):
    code, out, err = pipeswift("verify", file("0F1,0F0,0B1\n1F0,1B0,1F1,1B1\n"))
    assert (code, out) == (1, "")
    assert err.startswith("error: the schedule mine cannot run:\n")
    assert "0B0 never runs" in err
    assert "0F0 after 0F1" in err


def test_more_violations_than_fit_a_screen_are_all_said(pipeswift, file):
    forwards = ",".join(f"0F{i}" for i in range(30))
    _, _, err = pipeswift("verify", file(forwards + "\n"))
    assert err.count("completeness") == 30


def test_the_memory_limit(pipeswift, file):
    path = file("0F0,0F1,0B0,0B1\n")
    assert "(limit 2)" in pipeswift("verify", path, "--memory-limit", 2).out
    code, _, err = pipeswift("verify", path, "--memory-limit", 1)
    assert code == 1
    assert "rank 0 holds 2 activations when 0F1 starts" in err


def test_the_receive_pool(pipeswift, file):
    """Both ranks send before they receive: a deadlock when sends wait for their receiver."""
    path = file("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    assert pipeswift("verify", path).code == 0
    code, _, err = pipeswift("verify", path, "--receive-pool", 0)
    assert code == 1
    assert "deadlock" in err


def test_a_bad_cell_is_named_by_row_and_column(pipeswift, file):
    code, _, err = pipeswift("verify", file("0F0,0X0\n"))
    assert code == 1
    assert "row 1, column 2: '0X0' is not an action" in err


@pytest.mark.parametrize("name", ["none.csv", "none.json", "none.txt"])
def test_a_file_that_is_not_there(pipeswift, tmp_path, name):
    code, _, err = pipeswift("verify", tmp_path / name)
    assert code == 1
    assert err.startswith("error: ")
    assert name in err
