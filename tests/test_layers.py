"""Imports point one way: doors -> run, rl -> episode types; envs, policies and rewards do not know each other."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = {"errors", "optional", "config"}
# What the modules of each part may import of grpo_agents, by the beginning of the module's name below grpo_agents.
ALLOWED = {
    "": {"errors"},
    "assets": set(),
    "errors": set(),
    "optional": {"errors"},
    "config": {"errors"},
    "rl": {"rl"} | BASE,
    "rl.episode": {"errors"},
    "run": {"run", "rl.episode"} | BASE,
    "envs": {"envs", "rl.episode"} | BASE,
    "policies": {"policies", "rl.episode"} | BASE,
    "rewards": {"rewards", "rl.episode"} | BASE,
}
# They put the rooms together for the doors.
TOGETHER = {"agent", "trainer"}
INNER = {"run", "rl", "envs", "policies", "rewards"}
TOP_LEVEL = {"envs", "policies", "rewards", "assets"}


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the package under `root`, by its name below grpo_agents, the links followed."""
    found = {}
    for folder, _, files in os.walk(root / "grpo_agents", followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = path.relative_to(root / "grpo_agents").with_suffix("").parts
                name = ".".join(part for part in parts if part != "__init__")
                found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports anywhere; `from a import b` gives a.b, which may be a module or an object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def is_door(name: str, tree: ast.Module) -> bool:
    """A module directly in grpo_agents that is run as a command."""
    guards = (ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If))
    return name != "" and "." not in name and "__name__ == '__main__'" in guards


def within(name: str, parts: set[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def violations(root: Path) -> list[str]:
    """One line for each import that points the wrong way."""
    trees = modules(root)
    doors = {name for name, tree in trees.items() if is_door(name, tree)}
    found = []
    for name, tree in trees.items():
        if name in doors or name in TOGETHER:
            allowed = INNER | BASE | TOGETHER
        else:
            part = next((part for part in (name, name.split(".")[0]) if part in ALLOWED), None)
            if part is None:
                found.append(f"{name} is neither a door nor a part that this test knows")
                continue
            allowed = ALLOWED[part]
        for target in imports(tree):
            if target.startswith("."):
                found.append(f"{name} imports {target}: relative")
            elif target.split(".")[0] in TOP_LEVEL:
                found.append(f"{name} imports {target}: top level")
            elif target.startswith("grpo_agents."):
                inner = target.removeprefix("grpo_agents.")
                # An object of the package itself, such as __version__, is no module.
                is_module = inner in trees or inner.rpartition(".")[0] in trees.keys() - {""}
                if is_module and not within(inner, allowed):
                    found.append(f"{name} imports {inner}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("rl/loss.py", "from grpo_agents.envs import wrapper", "rl.loss imports envs.wrapper"),
        ("rl/loss.py", "def f():\n    import grpo_agents.run.plots", "rl.loss imports run.plots"),
        ("rl/episode.py", "from grpo_agents.rl.loss import grpo", "rl.episode imports rl.loss.grpo"),
        ("run/plots.py", "from grpo_agents.rl.loss import grpo", "run.plots imports rl.loss.grpo"),
        ("envs/wrapper.py", "from grpo_agents import train", "envs.wrapper imports train"),
        ("envs/wrapper.py", "from grpo_agents.policies import qwen", "envs.wrapper imports policies.qwen"),
        ("rewards/named.py", "import envs.wrapper", "rewards.named imports envs.wrapper: top level"),
        ("rewards/named.py", "from .other import f", "rewards.named imports .other.f: relative"),
        ("evaluate.py", "from grpo_agents.train import main", "evaluate imports train.main"),
        ("helpers.py", "import os", "helpers is neither a door nor a part that this test knows"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, path: str, line: str, expected: str) -> None:
    door = 'from grpo_agents.rl.loss import grpo\n\nif __name__ == "__main__":\n    pass\n'
    sources = dict.fromkeys(("errors.py", "rl/__init__.py", "rl/loss.py", "run/plots.py", "policies/qwen.py"), "")
    sources |= {"envs/wrapper.py": "from grpo_agents import __version__\n", "policies/__init__.py": ""}
    sources |= {
        "__init__.py": "from grpo_agents.errors import GrpoAgentsError\n",
        "train.py": door,
        "evaluate.py": door,
    }
    for name, source in (sources | {path: line + "\n" + sources.get(path, "")}).items():
        (tmp_path / "grpo_agents" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "grpo_agents" / name).write_text(source, encoding="utf-8")
    assert violations(tmp_path) == [expected]


def test_episode_types_need_numpy_alone() -> None:
    tops = {target.split(".")[0] for target in imports(modules(ROOT)["rl.episode"])}
    assert tops - sys.stdlib_module_names == {"numpy", "grpo_agents"}


@pytest.mark.parametrize("folder", ["tests", "experiments"])
def test_tests_and_experiments_import_the_package(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        tops = {target.split(".")[0] for target in imports(ast.parse(path.read_text(encoding="utf-8")))}
        assert not tops & TOP_LEVEL, path


@pytest.mark.parametrize("module", ["grpo_agents.config", "grpo_agents.run.config"])
def test_settings_are_read_without_heavy_imports(module: str) -> None:
    heavy = {"torch", "transformers", "gymnasium", "matplotlib"}
    code = f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_imported_packages_are_declared() -> None:
    """Imports at the head of a module have to be dependencies; optional packages are imported where they are used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {normalized(re.split(r"[^\w.-]", line)[0]) for line in project["dependencies"]}
    installed = packages_distributions()
    for name, tree in modules(ROOT).items():
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            tops = {target.split(".")[0] for target in imports(statement)}
            for top in tops - sys.stdlib_module_names - {"grpo_agents"}:
                assert {normalized(dist) for dist in installed.get(top, [])} & declared, f"{name} imports {top}"


def normalized(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
