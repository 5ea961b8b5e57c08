"""Runs of the commands that take seconds, and what two equal runs have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from grpo_agents.run.command import run_command

ROOT = Path(__file__).parent.parent
TINY = (
    "env=CartPole-v1",
    "env.kwargs.max_episode_steps=30",
    "policy.device=cpu",
    "episodes=4",
    "group.count=2",
    "group.size=2",
    "learner.max_steps=64",
    "eval.episodes=2",
    "eval.confirm=0",
)
"""A run of which an update takes about a second."""
LONG = (*TINY, "eval.every=3", "updates=4")
"""The run that others are compared with. It plays restarts, validates after update 3, and once more at its end."""


def command(door: str, *words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m grpo_agents.<door>` in a folder."""
    return subprocess.run(
        [sys.executable, "-m", f"grpo_agents.{door}", *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )


def environment(**variables: str) -> dict[str, str]:
    """The process's variables as on a machine without a display, and this checkout on the path."""
    unset = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER")
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    return {**kept, "PYTHONPATH": str(ROOT), **variables}


def train_here(folder: Path, *words: str) -> int:
    """Train in this process, as the command would in `folder`; returns its exit status."""
    from grpo_agents.train import main

    with chdir(folder):
        return run_command(main, list(words))


def long_run(factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of one `LONG` run by the command, and what the command said; made once for all tests."""
    if not _long_run:
        folder = factory.mktemp("long")
        _long_run.append((folder / "runs" / "long", command("train", *LONG, "name=long", folder=folder)))
    run, done = _long_run[0]
    assert done.returncode == 0, done.stderr
    return run, done


_long_run: list[tuple[Path, subprocess.CompletedProcess[str]]] = []


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def result(run: Path) -> dict[str, Any]:
    """All that equal runs have in common, down to the bytes of their adapters: everything but times and the name."""
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    exact = [path for path in files if path.suffix == ".safetensors" or path.name == "baselines.json"]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "files": sorted(str(path) for path in files if path.parts[0] != "tensorboard"),
        "bytes": {str(path): (run / path).read_bytes() for path in exact},
        "metrics": [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines(run)],
        "summary": {key: value for key, value in summary.items() if key != "wall_s"},
        "config": (run / "config.yaml").read_text().replace(f"name: {run.name}\n", ""),
    }
