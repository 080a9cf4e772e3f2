from rich.console import Console

from pipeswift.report import Summary
from pipeswift.report.table import comparison, facts

SUMMARY = Summary("1f1b", 4, 8, 1, 33.0, 32.5, 0.2727, 0.3, (4.0, 3.0, 2.0, 1.5))


def text(table, width=120):
    console = Console(width=width, color_system=None, markup=False)
    with console.capture() as printed:
        console.print(table)
    return [line.split() for line in printed.get().splitlines()]


def test_facts_beside_each_other():
    lines = text(facts({"predicted": SUMMARY, "measured": SUMMARY}))
    assert lines[0] == ["predicted", "measured"]
    assert ["makespan", "33", "s", "33", "s"] in lines
    assert ["longest", "span", "32.5", "s", "32.5", "s"] in lines
    assert ["bubble", "by", "span", "27.27", "%", "27.27", "%"] in lines
    assert ["bubble", "by", "makespan", "30.00", "%", "30.00", "%"] in lines


def test_one_column_needs_no_heading():
    assert text(facts({"simulated": SUMMARY}))[0] == ["makespan", "33", "s"]


def test_peaks_of_many_ranks_are_a_range():
    many = Summary("1f1b", 64, 128, 1, 1.0, 1.0, 0.0, 0.0, tuple(float(64 - rank) for rank in range(64)))
    assert text(facts({"": many}))[-2][-3:] == ["1", "to", "64"]
    assert text(facts({"": SUMMARY}))[-2][-4:] == ["4", "3", "2", "1.5"]


def test_a_schedule_without_figures_says_why_below():
    lines = text(comparison({"1f1b": SUMMARY, "other": "other needs [red] p"}))
    assert lines[2][:3] == ["1f1b", "33", "s"]
    assert lines[3] == ["other", "-", "-", "-", "-", "-", "-"]
    assert lines[-1] == ["-", "other", "needs", "[red]", "p"]
