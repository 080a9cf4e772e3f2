"""`pipeswift schedules`: what there is."""

from __future__ import annotations

from pipeswift.cli.output import console


def schedules() -> None:
    """List the schedules: where each comes from, what it costs, what it asks for."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from pipeswift.schedules import entries

    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    for title in ("paper", "idle time per rank", "peak activations of rank r", "needs"):
        table.add_column(title)
    for entry in entries():
        needs = [rule.text for rule in entry.rules]
        if entry.any_chunks:
            needs.append(f"--chunks, {entry.chunks} if not given")
        elif entry.chunks > 1:
            needs.append(f"{entry.chunks} chunks per rank")
        table.add_row(
            entry.name,
            entry.paper,
            entry.bubble.text if entry.bubble else "",
            entry.memory.text if entry.memory else "",
            "; ".join(needs),
        )
    console().print(table)
    console().print(
        "p ranks, m micro-batches, v chunks per rank; F, I, W, B = I + W: seconds per rank and micro-batch."
    )
