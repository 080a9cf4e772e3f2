"""What a run shows: a line where there is no terminal, a live view where there is one, a table at the end."""

import io
from pathlib import Path

from rich.console import Console

from pipeswift import schedules
from pipeswift.cost import Costs
from pipeswift.ir import Op
from pipeswift.program import BlockCosts, Grain, Line
from pipeswift.simulate import replay
from pipeswift.train.comparison import compare
from pipeswift.train.cut import Cut
from pipeswift.train.display import Lines, LiveView, close, describe, display
from pipeswift.train.metrics import Outcome, Row, Step

STEP = Step(
    loss=2.5,
    learning_rate=1e-3,
    gradient_norm=0.7,
    seconds=0.5,
    tokens_per_second=12345.6,
    utilization=(0.5, 0.75),
)


def test_a_step_is_one_line():
    assert describe(Row(step=7, training=STEP)) == "step    7  loss 2.500  12,346 tokens/s  busy 50% 75%"
    assert describe(Row(step=0, held_out=5.5)) == "step    0  held-out 5.500"


def test_without_a_terminal_evaluations_and_some_steps_are_printed(capsys):
    with display(steps=100) as view:
        assert isinstance(view, Lines)
        for step in range(1, 101):
            view.show(Row(step=step, held_out=2.0 if step == 99 else None, training=STEP))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 26
    assert "held-out 2.000" in lines[-2]


def test_the_live_view_keeps_the_last_evaluation_and_shows_every_rank():
    view = LiveView(steps=10)
    view.show(Row(step=1, held_out=3.25, training=STEP))
    view.show(Row(step=2, training=STEP))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(view.render())
    shown = console.export_text()
    for words in ("2/10", "loss 2.500", "held-out 3.250", "rank 1", "75% busy"):
        assert words in shown


COSTS = BlockCosts(Line(1e-3, 2e-9), sent=4e6, experts={op: Line(5e-4, 0.02) for op in Op})
MEASURED = "all-to-all takes 1.00 ms + 8.00 ms for 4.00 MB, experts 0.50 ms a chunk + 20.00 ms."


def test_the_closing_table_sets_prediction_beside_measurement(capsys):
    schedule = schedules.build("1f1b", 2, 4)
    measured = replay(schedule, Costs.uniform(2, comm=0.5))
    close(
        Outcome(
            schedule=schedule,
            cut=Cut((3, 2)),
            late_steps=(measured,),
            first_held_out=5.5,
            held_out=2.0,
            tokens_per_second=1000,
            seconds=60,
            copies=2,
            grains={0: Grain(2, 1, COSTS), 1: Grain(3, 1, COSTS)},
            cores=2,
            ranks_here=2,
            threads=1,
        ),
        compare(schedule, [measured]),
        Path("runs/x"),
    )
    shown = capsys.readouterr().out
    for words in (
        "makespan",
        "bubble by span",
        "2 1",
        "2 ranks",
        "shared 2 cores",
        "5.500 -> 2.000",
        "stage: 3 2.",
        "stage: 2/1, 3/1.",
        MEASURED,
        "the first of 2 copies",
    ):
        assert words in shown
