"""What is wrong with one setting, in a sentence: its name, its value, the rule, and a valid value."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def explain(problem: ErrorDetails, settings: type[BaseModel]) -> str:
    """The sentence for one of pydantic's findings about `settings`, a model of sections."""
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return _unknown(name, settings)
    value = json.dumps(problem["input"], default=str)
    rule = (
        "should be a path, in quotes"
        if problem["type"] == "path_type"
        else problem["msg"].removeprefix("Input ").removeprefix("Value error, ")
    )
    valid = _default(name, settings)
    return f"{name} = {value}: it {rule}" + (f", for example {name} = {valid}" if valid else "")


def _unknown(name: str, settings: type[BaseModel]) -> str:
    sections = _sections(settings)
    section, dot, key = name.partition(".")
    if not dot:
        close = difflib.get_close_matches(name, sections, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        return f"there is no section {name}.{hint} The sections are {', '.join(sections)}."
    here = list(sections[section].model_fields)
    home = dict.fromkeys(here, section)
    for other, model in sections.items():
        home = dict.fromkeys(model.model_fields, other) | home
    near = difflib.get_close_matches(key, here, n=1) or difflib.get_close_matches(key, home, n=1)
    hint = f" Did you mean {home[near[0]]}.{near[0]}?" if near else ""
    return f"there is no setting {name}.{hint} The settings of {section} are {', '.join(here)}."


def _default(name: str, settings: type[BaseModel]) -> str:
    """The default of a setting as TOML; "" where it has none."""
    section, _, key = name.partition(".")
    field = _sections(settings)[section].model_fields.get(key)
    default: Any = field.default if field else None
    return "" if default is None else json.dumps(default, default=str)


def _sections(settings: type[BaseModel]) -> dict[str, type[BaseModel]]:
    return {
        name: field.annotation
        for name, field in settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
