"""The settings of a configuration model as a flat list: dotted names, types in words, help, and the closest name.

Works for any pydantic model made of sections, as those of `grpo_agents.config` are.
"""

from __future__ import annotations

import difflib
import shutil
import textwrap
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from grpo_agents.config import MAIN_FIELDS


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: dotted name, as typed on the command line.
        kind: its type, without constraints and without None.
        optional: whether None is among its values.
        allowed: its values in words, to end the sentence "must be ...".
        default: its default; `PydanticUndefined` when it must be given.
        meaning: what it does.
    """

    name: str
    kind: Any
    optional: bool
    allowed: str
    default: Any
    meaning: str

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined


def is_section(annotation: Any) -> bool:
    """Whether a field holds settings of its own."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def find_settings(model: type[BaseModel], prefix: str = "") -> dict[str, Setting]:
    """All settings of a model and of its sections by dotted name, in the order of their definition."""
    found: dict[str, Setting] = {}
    for key, field in model.model_fields.items():
        name = prefix + key
        if is_section(field.annotation):
            found.update(find_settings(field.annotation, name + "."))  # type: ignore[arg-type]
            continue
        kind, optional = unwrap(field.annotation)
        default = field.get_default(call_default_factory=True)
        allowed = describe(field.annotation, field.metadata)
        found[name] = Setting(name, kind, optional, allowed, default, field.description or "")
    return found


def find_sections(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all sections, outer ones first."""
    found: list[str] = []
    for key, field in model.model_fields.items():
        if is_section(field.annotation):
            found += [prefix + key, *find_sections(field.annotation, prefix + key + ".")]  # type: ignore[arg-type]
    return found


def unwrap(annotation: Any) -> tuple[Any, bool]:
    """A type without its constraints and without None, and whether None was among its members."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        optional = len(members) < len(get_args(annotation))
        return (unwrap(members[0])[0] if len(members) == 1 else Any), optional
    return annotation, False


def describe(annotation: Any, constraints: Iterable[Any] = ()) -> str:
    """A type in words, to end the sentence "must be ..."."""
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(members[0], [*constraints, *members[1:]])
    if origin in (Union, types.UnionType):
        words = [describe(member, constraints) for member in members if member is not type(None)]
        unset = "null" if any("none" in get_args(member) for member in members) else "none"
        return " or ".join([*words, *([unset] if type(None) in members else [])])
    if origin is Literal:
        return " | ".join(str(member) for member in members)
    if origin is tuple:
        unique = dict.fromkeys(describe(member) for member in members)
        return f"{len(members)} values, comma-separated, each {' / '.join(unique)}"
    if origin is list:
        return f"a list of {describe(members[0])}"
    if origin is dict:
        return "a mapping"
    if is_section(annotation):
        return "{" + ", ".join(f"{key}: {describe(f.annotation)}" for key, f in annotation.model_fields.items()) + "}"
    plain = {bool: "true | false", int: "a whole number", float: "a number", str: "text"}.get(annotation, "a value")
    return " ".join([plain, *_bounds(constraints)])


def _bounds(constraints: Iterable[Any]) -> list[str]:
    words = []
    for constraint in constraints:
        for attribute, text in (("gt", "above {}"), ("ge", "from {}"), ("lt", "below {}"), ("le", "up to {}")):
            bound = getattr(constraint, attribute, None)
            if bound is not None:
                words.append(text.format(f"{bound:g}"))
    return words


def closest(name: str, settings: Iterable[str], sections: Iterable[str]) -> list[str]:
    """At most three names that an unknown one may have meant, the likeliest first; empty when none is near.

    A name whose last part is right but whose section is missing or wrong (`lr`, `optim.lr`) is found by that part.
    """
    names, known_sections = list(settings), list(sections)
    near = difflib.get_close_matches(name, [*names, *known_sections], n=1, cutoff=0.8)
    section, _, leaf = name.rpartition(".")
    if near or section in known_sections:
        return near or difflib.get_close_matches(name, [n for n in names if n.rpartition(".")[0] == section], 1, 0.75)
    leaves: dict[str, list[str]] = {}
    for candidate in names:
        leaves.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    if leaf in leaves:
        return sorted(leaves[leaf], key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())[:3]
    near_leaf = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return leaves[near_leaf[0]][:1] if near_leaf else difflib.get_close_matches(name, names, n=1, cutoff=0.6)


def show(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.model_dump().items()) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    return str(value)


def help_text(model: type[BaseModel], prog: str, summary: str) -> str:
    """The text of `--help`: usage, and each setting with default, meaning and type, grouped by section."""
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 130))
    settings = find_settings(model)
    required = "".join(f" {setting.name}=..." for setting in settings.values() if setting.required)
    lines = [
        f"usage: python -m {prog}{required} [key=value ...]",
        "",
        *textwrap.wrap(summary, width),
        "",
        *textwrap.wrap(
            "Settings are key=value words; the last of two equal keys wins. Lists are typed as [a,b] or a,b; none (or "
            "null) unsets a value. Quote what the shell would change: 'env.rules=Two words'.",
            width,
        ),
    ]
    for section in ["", *find_sections(model)]:
        own = [setting for setting in settings.values() if setting.name.rpartition(".")[0] == section]
        if not own:
            continue
        title = f"[{section}]" if section else "[general]"
        if section in MAIN_FIELDS:
            title += f"  {section}=X is short for {section}.{MAIN_FIELDS[section]}=X"
        lines += ["", title, *(line for setting in own for line in _help_lines(setting, width))]
    return "\n".join(lines)


def _help_lines(setting: Setting, width: int) -> list[str]:
    column = 40
    default = "... (must be given)" if setting.required else show(setting.default)
    if setting.default is None and "none" in get_args(setting.kind):
        default = "null"
    head = f"  {setting.name}={default}"
    body = textwrap.wrap(f"{setting.meaning} [{setting.allowed}]", max(30, width - column))
    if len(head) < column:
        return [f"{head:<{column}}{body[0]}", *(" " * column + line for line in body[1:])]
    return [head, *(" " * column + line for line in body)]
