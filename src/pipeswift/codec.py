"""Schedules as text: torch.distributed.pipelining's CSV, and a JSON that holds everything."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Action, Op, Order, Overlap, Schedule

FORMAT = "pipeswift-schedule"
VERSION = 1

# Nine digits are plenty, and fit the packed form.
_ACTION = r"\s*([0-9]{1,9})([FIWB])([0-9]{1,9})\s*"
_CELL = re.compile(_ACTION)
_OVERLAP_CELL = re.compile(rf"\s*\({_ACTION};{_ACTION}\)\s*OVERLAP_F_B\s*")


class ScheduleFileError(PipeSwiftError):
    """A schedule file, or the text of one, cannot be read or written."""


class Document(NamedTuple):
    """A schedule's JSON, read: the schedule and what was put beside it."""

    schedule: Schedule
    costs: Mapping[str, Any] | None
    provenance: Mapping[str, Any] | None


def load(path: str | Path) -> Schedule:
    """The schedule in a .csv or .json file. Raises ScheduleFileError when there is none, naming where it went wrong."""
    path = Path(path)
    read = {".csv": from_csv, ".json": from_json}[_suffix(path)]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ScheduleFileError(f"there is no schedule file {path}. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleFileError(f"cannot read the schedule file {path}: {error}.") from None
    return read(text, path=path)


def save(schedule: Schedule, path: str | Path) -> None:
    """Write the schedule as CSV or JSON, by the suffix of `path`. Raises ScheduleFileError when it cannot be."""
    path = Path(path)
    text = {".csv": to_csv, ".json": to_json}[_suffix(path)](schedule)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScheduleFileError(f"cannot write the schedule file {path}: {error}.") from None


def to_csv(schedule: Schedule) -> str:
    """One row per rank, one cell per action, in torch.distributed.pipelining's compute-only form.

    Raises ScheduleFileError for a schedule with several routes, which that form cannot say.
    """
    if len(schedule.routes) != 1:
        raise ScheduleFileError(
            f"a CSV holds one route and {schedule.name} has {len(schedule.routes)}. Save it as .json."
        )
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def from_csv(text: str, *, name: str | None = None, path: str | Path | None = None) -> Schedule:
    """The schedule in a CSV; the route follows from who runs each stage.

    Empty cells are idle slots and mean nothing here; spaces around a cell are allowed. `name` defaults to the file's.
    Raises ScheduleFileError for a cell that is not an action, naming row, column (from 1) and text, and when the
    stages or micro-batches are not numbered 0, 1, 2, ..., or two ranks run the same stage.
    """
    where = str(path or "the CSV")
    grid = list(csv.reader(text.splitlines()))
    while grid and not any(cell.strip() for cell in grid[-1]):
        grid.pop()
    orders = tuple(
        Order.of(
            parse_entry(cell, f"{where}, row {row}, column {column}")
            for column, cell in enumerate(cells, 1)
            if cell.strip()
        )
        for row, cells in enumerate(grid, 1)
    )
    if not orders:
        raise ScheduleFileError(f"{where} is empty: it needs one row of actions per rank, such as 0F0,0B0.")
    holder: dict[int, int] = {}
    microbatches: set[int] = set()
    for rank, order in enumerate(orders):
        for stage, _, microbatch in order.actions():
            if holder.setdefault(stage, rank) != rank:
                raise ScheduleFileError(
                    f"{where}: stage {stage} is in row {holder[stage] + 1} and in row {rank + 1}. "
                    "A CSV holds schedules with each stage on one rank; use .json for others."
                )
            microbatches.add(microbatch)
    _require_all("stage", holder, where)
    _require_all("micro-batch", microbatches, where)
    return Schedule(
        orders=orders,
        routes=(tuple(holder[stage] for stage in range(len(holder))),),
        route_of=(0,) * len(microbatches),
        name=name or (Path(path).stem if path else "custom"),
    )


def parse_entry(text: str, where: str) -> Action | Overlap:
    """The action ("2F5") or overlap ("(0F4;3B1)OVERLAP_F_B") in `text`; `where` is for the error."""
    if match := _CELL.fullmatch(text):
        return _action(*match.groups())
    if match := _OVERLAP_CELL.fullmatch(text):
        groups = match.groups()
        return Overlap(_action(*groups[:3]), _action(*groups[3:]))
    raise ScheduleFileError(
        f"{where}: {text.strip()!r} is not an action. "
        "Write stage, F, I, W or B, and micro-batch, such as 0F3, or an overlap, (0F4;3B1)OVERLAP_F_B."
    )


def _action(stage: str, op: str, microbatch: str) -> Action:
    return Action(int(stage), Op[op], int(microbatch))


def _require_all(what: str, numbers: Iterable[int], where: str) -> None:
    present = set(numbers)
    missing = sorted(set(range(len(present))) - present)
    if missing:
        raise ScheduleFileError(
            f"{where}: no row runs {what} {missing[0]}, though {what} {max(present)} is there. Number them 0, 1, 2, ..."
        )


def to_json(
    schedule: Schedule, *, costs: Mapping[str, Any] | None = None, provenance: Mapping[str, Any] | None = None
) -> str:
    """The schedule with everything that `from_json` needs to make an equal one, and the caller's notes beside it."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": schedule.name,
        "flush": schedule.flush,
        "options": dict(schedule.options),
        "routes": schedule.routes,
        "route_of": schedule.route_of,
        "orders": [list(map(str, order)) for order in schedule.orders],
    }
    document |= {key: dict(value) for key, value in (("costs", costs), ("provenance", provenance)) if value is not None}
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, *, path: str | Path | None = None) -> Schedule:
    """The schedule in a JSON text; see `read_json`."""
    return read_json(text, path=path).schedule


def read_json(text: str, *, path: str | Path | None = None) -> Document:
    """The schedule in a JSON text, and its costs and provenance where given.

    Raises ScheduleFileError when the text is not JSON, is of another format or version, or lacks something.
    """
    where = str(path or "the JSON")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number too long, and for nesting too deep
        raise ScheduleFileError(f"{where} is not JSON: {error}.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ScheduleFileError(f'{where} is not a schedule: it needs "format": "{FORMAT}".')
    if document.get("version") != VERSION:
        raise ScheduleFileError(
            f"{where} has version {document.get('version')!r} of the format, and this program reads {VERSION}. "
            "Write the file again with this program, or read it with the one that wrote it."
        )
    return _document(document, where)


def _document(document: dict[str, Any], where: str) -> Document:
    def get(key: str, kind: type, example: str) -> Any:
        value = document.get(key)
        if not isinstance(value, kind):
            raise ScheduleFileError(f"{where}: {key!r} is {value!r}. It has to be such as {example}.")
        return value

    def numbers(value: Any, key: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ScheduleFileError(f"{where}: {key!r} holds {value!r}. It has to be whole numbers, such as [0, 1].")
        return tuple(value)

    def order(rank: int, cells: Any) -> Order:
        if not isinstance(cells, list):
            raise ScheduleFileError(f"{where}: rank {rank} of 'orders' is {cells!r}. It has to be such as ['0F0'].")
        places = ((str(cell), f"{where}, rank {rank}, entry {at}") for at, cell in enumerate(cells))
        return Order.of(parse_entry(cell, place) for cell, place in places)

    schedule = Schedule(
        orders=tuple(order(rank, cells) for rank, cells in enumerate(get("orders", list, "[['0F0', '0B0']]"))),
        routes=tuple(numbers(route, "routes") for route in get("routes", list, "[[0, 1]]")),
        route_of=numbers(get("route_of", list, "[0, 0]"), "route_of"),
        name=get("name", str, "'custom'"),
        flush=get("flush", bool, "true"),
        options=get("options", dict, "{}"),
    )
    notes = (get(key, dict, "{}") if key in document else None for key in ("costs", "provenance"))
    return Document(schedule, *notes)


def _suffix(path: Path) -> str:
    if path.suffix.lower() not in (".csv", ".json"):
        raise ScheduleFileError(f"a schedule file ends in .csv or .json: got {path}.")
    return path.suffix.lower()
