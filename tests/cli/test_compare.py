def rows(out):
    """Each row's cells, one blank between them, by the name in front."""
    words = (line.split() for line in out.splitlines() if line.strip())
    return {name: " ".join(cells) for name, *cells in words}


def test_schedules_side_by_side(pipeswift):
    code, out, err = pipeswift("compare", "gpipe", "1f1b", "interleaved-1f1b", "--pp", 4, "--microbatches", 8)
    assert (code, err) == (0, "")
    found = rows(out)
    assert found["gpipe"] == "33 s 33 s 27.27 % 27.27 % 8 8 8 8 x 1"
    assert found["1f1b"] == "33 s 33 s 27.27 % 27.27 % 4 3 2 1 x 1"
    assert found["interleaved-1f1b"].startswith("28.5 s ")


def test_chunks_go_to_the_schedules_that_have_a_choice(pipeswift):
    code, out, _ = pipeswift("compare", "1f1b", "interleaved-1f1b", "--pp", 2, "--microbatches", 4, "--chunks", 3)
    assert code == 0
    assert rows(out)["interleaved-1f1b"].startswith("13 s ")


def test_a_schedule_that_does_not_suit_says_why_and_the_others_stay(pipeswift):
    code, out, _ = pipeswift("compare", "1f1b", "interleaved-1f1b", "--pp", 4, "--microbatches", 6)
    assert code == 0
    assert rows(out)["1f1b"].startswith("27 s ")
    assert rows(out)["interleaved-1f1b"] == "- - - - - -"
    assert "needs a number of micro-batches that is a multiple of --pp" in out


def test_files_take_part(pipeswift, tmp_path):
    file = tmp_path / "mine.csv"
    pipeswift("simulate", "gpipe", "--pp", 4, "--microbatches", 8, "--csv", file)
    _, out, _ = pipeswift("compare", "gpipe", file, "--pp", 4, "--microbatches", 8)
    assert rows(out)[str(file)] == rows(out)["gpipe"]


def test_when_none_suits_it_fails(pipeswift):
    assert pipeswift("compare", "interleaved-1f1b", "--pp", 4, "--microbatches", 6).code == 1


def test_an_unknown_name_fails_at_once(pipeswift):
    code, out, err = pipeswift("compare", "1f1b", "gpip", "--pp", 4, "--microbatches", 6)
    assert (code, out) == (1, "")
    assert "Did you mean gpipe?" in err
