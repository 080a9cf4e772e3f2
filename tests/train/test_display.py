"""What a run shows: a line where there is no terminal, a live view where there is one."""

import io

from rich.console import Console

from pipeswift.train.display import Lines, LiveView, describe, display
from pipeswift.train.metrics import Row, Step

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
