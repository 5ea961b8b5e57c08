"""YAML files and values, read by the type of the setting they are for, with the line where each stands."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from grpo_agents.errors import ConfigError
from grpo_agents.run.settings import is_section, unwrap


def convert(node: Any, kind: Any, optional: bool) -> Any:
    """A YAML node as the plain value that a setting takes. What does not fit is left for pydantic to refuse.

    Args:
        node: scalar, sequence or mapping node.
        kind: the type, as `grpo_agents.run.settings.unwrap` gives it.
        optional: whether None is a value of the setting.

    Raises:
        ValueError: a number is not finite.
    """
    origin, members = get_origin(kind), get_args(kind)
    if isinstance(node, yaml.ScalarNode):
        if optional and _is_null(node, kind) and not (origin is Literal and node.value in members):
            return None
        if origin in (list, tuple) and node.style is None:
            node = yaml.compose(f"[{node.value}]", Loader=yaml.SafeLoader)
        elif not is_section(kind):
            return _scalar(node, kind)
    if origin in (list, tuple):
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        kinds = members * len(nodes) if origin is list else (*members, *members[-1:] * len(nodes))
        return [convert(item, *unwrap(inner)) for item, inner in zip(nodes, kinds, strict=False)]
    if is_section(kind):
        fields = kind.model_fields
        if not isinstance(node, yaml.MappingNode):
            first, field = next(iter(fields.items()))
            return {first: convert(node, *unwrap(field.annotation))}
        return {
            key.value: convert(item, *unwrap(fields[key.value].annotation if key.value in fields else Any))
            for key, item in node.value
        }
    return plain(node)


def _scalar(node: yaml.ScalarNode, kind: Any) -> Any:
    text = node.value
    if kind is Any:
        return plain(node)
    if kind in (int, float):
        try:
            number = float(text)
        except ValueError:
            return text
        if not math.isfinite(number):
            raise ValueError("must be a finite number")
        # 1e5 is a whole number to a person; int() alone refuses it.
        return number if kind is float else int(number) if re.search("[eE.]", text) and number.is_integer() else text
    return text


def _is_null(node: yaml.ScalarNode, kind: Any) -> bool:
    if node.style is not None:
        return False
    # On the command line an empty text is a text: `env.question=` asks for no question.
    empty = not node.value and not (kind is str and node.tag == "")
    return empty or node.value in ("~", "null", "Null", "NULL", "none", "None")


def plain(node: Any) -> Any:
    """A YAML node as dictionaries, lists and scalars; 1e-4 is a number here, which YAML 1.1 takes for text."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: plain(item) for key, item in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain(item) for item in node.value]
    if _is_null(node, Any):
        return None
    if node.style is not None:
        return node.value
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", node.value):
        return float(node.value)
    typed = node.tag.rpartition(":")[2] in ("bool", "int", "float")
    return yaml.safe_load(node.value) if typed else node.value


def place(path: Path, node: Any) -> str:
    """File and line of a node, for messages."""
    return f"{path} line {node.start_mark.line + 1}"


def reason(error: yaml.YAMLError) -> str:
    """What YAML says is wrong, on one line."""
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file (looked from {Path.cwd()})"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error})"]) from error


def compose(path: Path) -> yaml.MappingNode | None:
    """A file's root mapping with line numbers; None for an empty file.

    Raises:
        ConfigError: the file is missing or is not YAML, its root is no mapping, or a key stands twice.
    """
    try:
        root = yaml.compose(_read(path), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError([f"{path}{line}: not readable as YAML ({reason(error)})"]) from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError([f"{path}: must hold 'key: value' lines"])
    problems: list[str] = []
    mappings = [root] if root else []
    while mappings:
        seen: set[str] = set()
        for key, value in mappings.pop().value:
            if not isinstance(key, yaml.ScalarNode):
                problems.append(f"{place(path, key)}: a key must be a name")
                continue
            if key.value in seen:
                problems.append(f"{place(path, key)}: '{key.value}' stands twice in one mapping; keep one")
            seen.add(key.value)
            if isinstance(value, yaml.MappingNode):
                mappings.append(value)
    if problems:
        raise ConfigError(problems)
    return root


def load(path: Path) -> dict[str, Any]:
    """A file's mapping as YAML's safe loader reads it.

    Raises:
        ConfigError: as `compose`.
    """
    root = compose(path)
    return yaml.safe_load(_read(path)) if root is not None else {}
