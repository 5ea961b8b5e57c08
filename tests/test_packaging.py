"""The package as it is installed: what the wheel holds, and that lost links do no harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import grpo_agents

ROOT = Path(__file__).parent.parent
LINKS = ["assets", "envs", "policies", "rewards"]
DATA = {".jinja", ".json", ".safetensors", ".txt"}
BUILT = ("pyproject.toml", "LICENSE", "README.md")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files a build needs, with their links, where a build may write beside them."""
    target = tmp_path / "copy"
    target.mkdir()
    for name in ["grpo_agents", *LINKS]:
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILT:
        shutil.copy(ROOT / name, target)
    return target


def build(source: Path, kind: str) -> Path:
    """Build a "wheel" or an "sdist" of `source` with the setuptools that is installed."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = (source / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def package_files(root: Path) -> list[str]:
    """The files that an installed package must have, the links followed."""
    found = [
        Path(folder, file).relative_to(root)
        for folder, _, files in os.walk(root / "grpo_agents", followlinks=True)
        for file in files
    ]
    kept = [path for path in found if path.suffix == ".py" or path.name == "py.typed"]
    kept += [path for path in found if path.parts[1] == "assets" and path.suffix in DATA]
    return sorted(path.as_posix() for path in kept)


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative(name: str) -> None:
    assert os.readlink(ROOT / "grpo_agents" / name) == f"../{name}"


def test_wheel_holds_each_file_once_and_nothing_beside_the_package(copy: Path) -> None:
    with zipfile.ZipFile(build(copy, "wheel")) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        assert Parser().parsestr(wheel.read(metadata).decode())["Version"] == grpo_agents.__version__
    info = metadata.partition("/")[0]
    assert sorted(name for name in names if not name.startswith(info + "/")) == package_files(copy)
    assert f"{info}/licenses/LICENSE" in names
    assert "grpo_agents/envs/__init__.py" in names


def test_wheel_of_the_sdist_is_the_same(copy: Path, tmp_path: Path) -> None:
    with tarfile.open(build(copy, "sdist")) as sdist:
        sdist.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    with zipfile.ZipFile(build(unpacked, "wheel")) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(names) == package_files(copy)


def test_packages_are_found_where_links_became_plain_files(copy: Path) -> None:
    for name in LINKS:
        (copy / "grpo_agents" / name).unlink()
        (copy / "grpo_agents" / name).write_text(f"../{name}", encoding="utf-8")
    code = (
        "from importlib.util import find_spec\n"
        "for name in ['envs', 'policies', 'rewards', 'rl']: print(find_spec('grpo_agents.' + name).origin)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=True)
    folders = [copy / "envs", copy / "policies", copy / "rewards", copy / "grpo_agents" / "rl"]
    assert [Path(line) for line in done.stdout.splitlines()] == [folder / "__init__.py" for folder in folders]


def test_constraints_pin_every_dependency_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        if name != "grpo-agents":
            assert pins[name] in requirement.specifier, requirement
    # A CUDA build is the same version with a local suffix, so one pin serves every machine.
    assert "+" not in pins["torch"]
    assert version("torch").partition("+")[0] == pins["torch"]


def test_processors_import_beside_any_build_of_torch() -> None:
    code = (
        "from grpo_agents.policies.torchvision_ops import register_missing_ops as register\n"
        "register()\n"
        "assert not register()\n"
        "import qwen_vl_utils, torchvision\n"
        "from transformers import AutoProcessor, Qwen3VLProcessor\n"
        "print(Qwen3VLProcessor.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("Qwen3VLProcessor", 0), done.stderr


def test_operators_that_exist_are_not_declared_again() -> None:
    """As beside a matching torchvision. The module is run by itself, since its package may call it when imported."""
    code = (
        "import runpy, torch\n"
        "library = torch.library.Library('torchvision', 'FRAGMENT')\n"
        "library.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        "print(runpy.run_path('policies/torchvision_ops.py')['register_missing_ops']())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
