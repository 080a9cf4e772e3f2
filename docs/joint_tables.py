"""Writes the figures of bench/joint.py into docs/joint.md: `python docs/joint_tables.py FILE.json...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "joint.md"
END = "<!-- end -->"
DECIMALS = {
    "capacity": 2,
    "step": 0,
    "deviation": 1,
    "exposed": 0,
    "simulated": 3,
    "over static": 4,
    "held-out loss": 3,
    "least": 3,
    "most": 3,
}  # of columns; 1 for others

Row = Mapping[str, Any]


def begin(name: str) -> str:
    return f"<!-- {name}, written by docs/joint_tables.py: begin -->"


def table(rows: Sequence[Row]) -> str:
    lines = [list(rows[0]), ["---" if isinstance(value, str) else "---:" for value in rows[0].values()]]
    lines += [[_cell(name, value) for name, value in row.items()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(name: str, value: Any) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.{DECIMALS.get(name, 1)}f}"


def tables(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, table) for each in the files; the ablation's by skew."""
    for file in files:
        for name, rows in json.loads(Path(file).read_text("utf-8")).items():
            for skew in dict.fromkeys(row.get("skew", name) for row in rows):
                mine = [row for row in rows if row.get("skew", name) == skew]
                yield skew, table([{key: value for key, value in row.items() if key != "skew"} for row in mine])


def main() -> None:
    page = PAGE.read_text("utf-8")
    for name, text in tables(sys.argv[1:]):
        before, rest = page.split(begin(name) + "\n", 1)
        page = f"{before}{begin(name)}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}"
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
