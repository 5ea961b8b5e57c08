"""The pictures are written whole, equal for equal runs, and hold what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from grpo_agents.errors import CheckpointError
from grpo_agents.run.plots import return_curve, return_histograms

LINES: list[dict[str, Any]] = [
    {"env_steps": 1000 * n, "return/mean": 20.0 * n, "return/p10": 10.0 * n, "return/p90": 30.0 * n}
    for n in range(1, 9)
]
LINES[3]["validation/mean"] = 90.0
LINES[5]["return/mean"] = None


def colors(path: Path) -> set[str]:
    pixels = (imread(path)[..., :3].reshape(-1, 3) * 255).round().astype(np.int64)
    return {f"#{color:06X}" for color in np.unique(pixels @ [65536, 256, 1])}


def test_the_curve_draws_training_validation_and_baselines(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    return_curve(LINES, path, threshold=150.0, baselines={"random": 22.0, "untrained": 40.0})
    assert imread(path).shape[:2] == (612, 1080)
    assert {"#0072B2", "#D55E00", "#009E73", "#E69F00", "#000000"} <= colors(path)
    first = path.read_bytes()
    return_curve(LINES, path, threshold=150.0, baselines={"random": 22.0, "untrained": 40.0})
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == ["curve.png"]


@pytest.mark.parametrize("lines", [[], LINES[:1], [{"env_steps": 0}]])
def test_a_curve_of_next_to_nothing_is_drawn_too(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    return_curve(lines, tmp_path / "curve.png", threshold=None, baselines={})
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_the_histograms_have_a_row_for_each_policy(tmp_path: Path) -> None:
    path = tmp_path / "returns.png"
    return_histograms([20.0, 30.0], [500.0] * 5, [9.0], path)
    assert {"#0072B2", "#009E73", "#E69F00"} <= colors(path)
    return_histograms([9.0], [9.0], [9.0], path)


def test_a_picture_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing.*curve\.png cannot be written"):
        return_curve(LINES, tmp_path / "missing" / "curve.png", threshold=None, baselines={})


def test_pyplot_is_not_imported() -> None:
    code = "import sys, grpo_agents.run.plots; print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
