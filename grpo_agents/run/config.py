"""Reads settings from the command line and from experiment files, and reports every problem at once.

    config = parse(TrainConfig, sys.argv[1:], prog="grpo_agents.train", summary="Train an agent.")

A word `key=value` sets `key` (a dotted name, or a section's name for its main field). Values are YAML, read by the type
of the setting: what is text by type stays text (`name=007`). An experiment file holds the same keys, nested or dotted,
and one mapping `about` (what it is, command, hardware, minutes, numbers to expect) that is no setting. The command line
wins over the file, the file over the defaults.

Importing this module imports neither torch nor gymnasium.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from grpo_agents.config import MAIN_FIELDS, TrainConfig
from grpo_agents.errors import ConfigError
from grpo_agents.run.config_checks import check_train
from grpo_agents.run.settings import closest, find_sections, find_settings, help_text, show
from grpo_agents.run.yaml_values import compose, convert, load, place, plain, reason

__all__ = ["ABOUT", "check_train", "load_yaml", "parse", "read_experiment", "to_yaml"]

T = TypeVar("T", bound=BaseModel)

ABOUT = "about"
"""The one top-level key of an experiment file that is no setting."""


def parse(model: type[T], argv: list[str], *, prog: str, summary: str) -> T:
    """Settings from the words of a command line.

    Args:
        model: what to fill, e.g. `TrainConfig`.
        argv: the words after the program's name.
        prog: module name for the usage line, e.g. "grpo_agents.train".
        summary: what the command does, for `--help`.

    Returns:
        The filled model; its `model_fields_set` tells what was given.

    Raises:
        ConfigError: with every problem found in one pass.
        SystemExit: status 0, after `--help` or `-h` was answered on stdout.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(model, prog, summary))
        raise SystemExit(0)
    reader = _Reader(model)
    pairs = [pair for pair in map(reader.split, argv) if pair]
    experiments = [value for key, value in pairs if key == "experiment"]
    if experiments and "experiment" in reader.settings:
        reader.read_file(Path(experiments[-1]))
    for key, text in pairs:
        reader.put_text(key, text)
    config: T = reader.build()
    return config


def read_experiment(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """An experiment file's settings and its `about` mapping, both as plain YAML values, unchecked.

    Raises:
        ConfigError: the file is missing, is not YAML, or is no mapping.
    """
    settings = load(Path(path))
    about = settings.pop(ABOUT, None) or {}
    if not isinstance(about, dict):
        raise ConfigError([f"{path}: '{ABOUT}' must be a mapping, and is {about!r}"])
    return settings, about


def to_yaml(model: BaseModel) -> str:
    """All settings as YAML; `load_yaml` reads them back unchanged."""
    return yaml.safe_dump(_listed(model.model_dump()), sort_keys=False, allow_unicode=True, width=10_000)


def load_yaml(model: type[T], path: str | Path) -> T:
    """A model from a file that `to_yaml` wrote.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds settings that this version does not take.
    """
    reader = _Reader(model)
    try:
        return model.model_validate(load(Path(path)))
    except ValidationError as error:
        raise ConfigError([f"{path}: {text}" for text in reader.explain(error).values()]) from error


class _Reader:
    """Collects values and problems, and builds the model from them."""

    def __init__(self, model: type[BaseModel]):
        self.model = model
        self.settings = find_settings(model)
        self.sections = find_sections(model)
        self.mappings = [name for name, setting in self.settings.items() if get_origin(setting.kind) is dict]
        self.values: dict[str, Any] = {}
        self.given: dict[str, str] = {}
        self.problems: list[str] = []

    def split(self, word: str) -> tuple[str, str] | None:
        """Key and value of a word; None, and a problem, where it has no `=` or leading dashes."""
        key, equals, text = word.partition("=")
        bare = key.lstrip("-")
        if not equals or not bare:
            example = f"{bare}=VALUE" if self._known(bare) else "seed=3"
            self.problems.append(f"{word!r} is not key=value; write it like {example}")
        elif bare != key:
            self.problems.append(f"{word!r}: settings are written without dashes; write {bare}={text}")
        else:
            return key, text
        return None

    def put_text(self, key: str, text: str) -> None:
        """Take one `key=value` of the command line."""
        setting = self.settings.get(f"{key}.{MAIN_FIELDS[key]}" if self._is_short(key, text) else key)
        node: yaml.Node | None = yaml.ScalarNode("", text)
        if setting is None or get_origin(setting.kind) in (list, tuple, dict):
            try:
                node = yaml.compose(text, Loader=yaml.SafeLoader) or node
            except yaml.YAMLError as error:
                known = self._known(key) or any(key.startswith(name + ".") for name in self.mappings)
                sentence = f"{key}={text}: not readable as YAML ({reason(error)})"
                self.problems.append(sentence if known else self._unknown_text(key))
                return
        self.put(key, node, text, "")

    def read_file(self, path: Path) -> None:
        """Take all settings of an experiment file."""
        try:
            root = compose(path)
        except ConfigError as error:
            self.problems += error.problems
            return
        for key, value in root.value if root else ():
            if key.value == ABOUT:
                continue
            if key.value == "experiment":
                self.problems.append(f"{place(path, key)}: an experiment file cannot name another; copy its settings")
                continue
            self.put(key.value, value, None, place(path, key), path)

    def put(self, key: str, node: Any, text: str | None, where: str, path: Path | None = None) -> None:
        """Take one key, whose value may be a whole section.

        Args:
            key: dotted name of a setting or of a section.
            node: its value.
            text: the value as typed, for messages; None to write it from the node.
            where: file and line, empty for the command line.
            path: the file, to find the lines of nested keys.
        """
        if key in self.sections:
            if isinstance(node, yaml.MappingNode):
                for inner, value in node.value:
                    self.put(f"{key}.{inner.value}", value, None, place(path, inner) if path else where, path)
            elif key in MAIN_FIELDS:
                self.put(f"{key}.{MAIN_FIELDS[key]}", node, text, where, path)
            else:
                inside = ", ".join(name for name in self.settings if name.startswith(key + "."))
                self._problem(where, f"{key} is a section; set one of {inside}")
            return
        shown = show(plain(node)) if text is None else text
        owner = key if key in self.settings else next((m for m in self.mappings if key.startswith(m + ".")), None)
        if owner is None:
            self._problem(where, self._unknown_text(key))
            return
        self.given[owner] = f"{where}: {key}={shown}" if where else f"{key}={shown}"
        try:
            if owner == key:
                self.values[key] = convert(node, self.settings[key].kind, self.settings[key].optional)
            else:
                inner = key[len(owner) + 1 :]
                if "." in inner:
                    raise ValueError(f"write a nested value as {owner}.{inner.split('.')[0]}={{...}}")
                self.values[owner] = {**(self.values.get(owner) or {}), inner: convert(node, Any, True)}
        except (ValueError, TypeError, yaml.YAMLError) as error:
            self.values.pop(owner, None)
            self.problems.append(f"{self.given[owner]}: {error}")

    def build(self) -> Any:
        """The model; its cross-field checks are part of the same report."""
        wrong: dict[str, str] = {}
        config: BaseModel | None = None
        try:
            config = self.model.model_validate(_nest(self.values))
        except ValidationError as error:
            wrong = self.explain(error)
            try:
                config = self.model.model_validate(_nest({k: v for k, v in self.values.items() if k not in wrong}))
            except ValidationError:
                config = None  # a setting that must be given is absent
        self.problems += wrong.values()
        if isinstance(config, TrainConfig):
            # A check between a wrong setting and a right one would speak of a default that nobody asked for.
            self.problems += [p for p in check_train(config) if not any(name in p for name in wrong)]
        if self.problems:
            raise ConfigError(self.problems)
        return config

    def explain(self, error: ValidationError) -> dict[str, str]:
        """One sentence for each setting that pydantic refuses, by the setting's name."""
        sentences: dict[str, str] = {}
        for detail in error.errors():
            parts = [str(part) for part in detail["loc"]]
            key = ".".join(parts)
            name = next((name for name in self.settings if f"{key}.".startswith(name + ".")), None)
            if name is None:
                sentences[key] = f"{key} is a section" if key in self.sections else self._unknown_text(key)
                continue
            setting = self.settings[name]
            if detail["type"] == "missing" and name == key:
                sentences[name] = f"{name}=... must be given: {setting.meaning}"
                continue
            given = self.given.get(name, f"{name}={show(detail['input'])}")
            inner = parts[name.count(".") + 1 :]
            extra = f" (item {'.'.join(inner)}: {detail['msg']})" if inner else ""
            sentences.setdefault(name, f"{given}: must be {setting.allowed}{extra}")
        return sentences

    def _is_short(self, key: str, text: str) -> bool:
        return key in self.sections and key in MAIN_FIELDS and not text.lstrip().startswith("{")

    def _known(self, key: str) -> bool:
        return key in self.settings or key in self.sections

    def _problem(self, where: str, sentence: str) -> None:
        self.problems.append(f"{where}: {sentence}" if where else sentence)

    def _unknown_text(self, key: str) -> str:
        near = closest(key, self.settings, self.sections)
        section = key.rpartition(".")[0]
        if near:
            hint = "did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
        elif section in self.sections:
            hint = f"{section} has {', '.join(name for name in self.settings if name.rpartition('.')[0] == section)}"
        else:
            hint = "--help lists all settings"
        return f"unknown setting '{key}'; {hint}"


def _nest(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, leaf = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = value
    return nested


def _listed(value: Any) -> Any:
    """Tuples as lists, which YAML's safe dumper can write."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value
