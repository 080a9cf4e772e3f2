"""The house: imports go down only, and the core knows nothing of torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeswift

ROOT = Path(pipeswift.__file__).parent

#: From the roof down. A module imports from lower floors, and from its own package; on the ground nobody knows anybody.
FLOORS = (
    {"__main__"},
    {"cli"},
    {"train", "rehearse", "studio"},
    {"__init__"},
    {"moe", "plan", "nn"},
    {"runtime"},
    {"search"},
    {"verify", "simulate", "schedules"},
    {"passes", "policy", "report", "program", "codec", "versions"},
    {"ir", "cost", "trace", "errors"},
)
HEIGHT = {room: len(FLOORS) - level for level, rooms in enumerate(FLOORS) for room in rooms}

#: Rooms, and parts of rooms, in which torch is not to be seen, not even inside a function.
WITHOUT_TORCH = (
    *("ir", "cost", "trace", "errors", "program", "passes", "schedules", "policy", "report", "codec", "versions"),
    *("verify", "simulate", "search", "plan.profile", "plan.partition", "plan.tune"),
)

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(module: str) -> Iterator[str]:
    """The absolute names of what a module imports, wherever in its text."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_of(module: str) -> set[str]:
    """The rooms that a module imports from, its own left out."""
    inside = (name.split(".")[1] for name in imports(module) if name.startswith("pipeswift."))
    return {room if room in HEIGHT else "__init__" for room in inside} - {module.split(".")[0]}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module):
    room = module.split(".")[0]
    assert room in HEIGHT, f"{room} has no floor yet"
    upwards = {other for other in rooms_of(module) if HEIGHT[other] >= HEIGHT[room]}
    assert not upwards, f"{module} imports {upwards}"


@pytest.mark.parametrize("module", MODULES)
def test_the_core_does_without_torch(module):
    if any(f"{module}.".startswith(f"{room}.") for room in WITHOUT_TORCH):
        assert not {name for name in imports(module) if name.split(".")[0] == "torch"}
