"""The pages about schedules say what the code says."""

import re
import runpy
from pathlib import Path

import pytest

from pipeswift.schedules import entries

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_of_schedules_is_the_computed_one():
    table = runpy.run_path(str(DOCS / "tables.py"))["table"]
    assert table() in (DOCS / "schedules" / "README.md").read_text(encoding="utf-8")


def test_which_schedule_when_is_the_computed_one():
    page = (DOCS / "which-schedule.md").read_text(encoding="utf-8")
    for section in runpy.run_path(str(DOCS / "which_schedule.py"))["sections"]():
        assert section in page


@pytest.mark.parametrize("name", [found.name for found in entries()])
def test_every_schedule_has_a_page_with_its_picture(name):
    page = (DOCS / "schedules" / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    assert f"]({name}.svg)" in page
    assert (DOCS / "schedules" / f"{name}.svg").exists()


@pytest.mark.parametrize("name", ["dualpipe"])
def test_the_page_says_whether_the_overlap_is_real(name):
    assert "**Is the overlap real?**" in (DOCS / "schedules" / f"{name}.md").read_text(encoding="utf-8")


def test_the_table_of_what_works_is_held_by_tests():
    first, *_ = (DOCS / "supported.md").read_text(encoding="utf-8").split("\n## ")
    rows = re.findall(r"^\|.*\|$", first, re.MULTILINE)[2:]
    assert len(rows) >= 12
    for row in rows:
        _, works, *_, held = (cell.strip() for cell in row.strip("|").split("|"))
        if works == "no":
            continue
        found = re.findall(r"`(\w+(?:/\w+)*\.py)::(\w+)`", held)
        assert found, row
        for file, name in found:
            assert f"def {name}(" in (DOCS.parent / "tests" / file).read_text(encoding="utf-8"), row


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
