"""The picture of the experiment page: return against environment steps of everything that learned.

Colours are those of Okabe and Ito (2008), which colour-blind readers tell apart; line styles tell them apart in grey too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.results import Record
from grpo_agents.run.plots import BLUE, DPI, GREEN, GREY, ORANGE, PURPLE, VERMILION

STYLES: dict[str, tuple[str, Any, str]] = {
    "default": (BLUE, "-", "GRPO, default"),
    "return_to_go": (PURPLE, (0, (5, 1, 1, 1, 1, 1)), "GRPO, group.advantage=return_to_go"),
    "episode": (ORANGE, "--", "GRPO, group.advantage=episode"),
    "reset": (GREEN, "-.", "GRPO, group.start=reset"),
    "ppo-frames": (VERMILION, (0, (3, 1, 1, 1)), "PPO, frames"),
    "ppo-state": (GREY, ":", "PPO, state"),
}
PANELS = {"validation/mean": "validation, greedy", "return/mean": "training, sampled"}
THRESHOLD = 475


def draw(parts: dict[str, Record], path: Path) -> None:
    """Draw two panels, validation and training, with one line a run; all seeds of a variant look alike.

    Args:
        parts: records by name; those without a curve are passed over.
        path: the PNG file.
    """
    figure = Figure(figsize=(10.0, 4.6), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot(1, 2, 1)
    panels = [left, figure.add_subplot(1, 2, 2, sharex=left, sharey=left)]
    shown = [family for family in STYLES if any(_is_of(name, family) for name in parts)]
    for axes, (key, title) in zip(panels, PANELS.items(), strict=True):
        _prepare(axes, title)
        for family in shown:
            color, style, _ = STYLES[family]
            for name in sorted(parts):
                if _is_of(name, family):
                    steps, values = _known(parts[name]["curve"], key)
                    marker = "o" if key.startswith("validation") else None
                    axes.plot(steps, values, color=color, linestyle=style, linewidth=1.6, marker=marker, markersize=3)
    left.set_xlim(left=0)
    left.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    left.set_ylabel("return (sum of rewards of an episode)")
    handles = [
        Line2D([], [], color=color, linestyle=style, linewidth=2, label=label)
        for color, style, label in (STYLES[family] for family in shown)
    ]
    handles.append(Line2D([], [], color="black", linewidth=1, label=f"threshold ({THRESHOLD})"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def _is_of(name: str, family: str) -> bool:
    return name.rpartition("-")[0] == family


def _prepare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.axhline(THRESHOLD, color="black", linewidth=1)
    axes.set_ylim(0, 520)


def _known(curve: dict[str, list[float | None]], key: str) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([np.nan if value is None else value for value in curve[key]], dtype=np.float64)
    there = np.isfinite(values)
    return np.array(curve["env_steps"])[there], values[there]
