"""The two pictures of a run, as PNG files. Figures are made without pyplot, so nothing global is touched.

Colours are those of Okabe and Ito (2008), which colour-blind readers tell apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from grpo_agents.errors import CheckpointError

BLUE, VERMILION, GREEN, ORANGE, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#666666"
DPI = 144
SIZE = (7.5, 4.25)
"""Inches; with `DPI` 1080 x 612 pixels, which a README shows at about four fifths."""


def return_curve(
    metrics: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    threshold: float | None,
    baselines: Mapping[str, float],
) -> None:
    """Draw return against environment steps: training mean with its spread, validation, and lines to compare with.

    Args:
        metrics: lines of metrics.jsonl. Read are env_steps, return/mean, return/p10, return/p90 (training, sampled
            actions) and validation/mean (greedy); what is absent or None is left out.
        path: the PNG file; replaced in one step.
        threshold: the environment's `reward_threshold`, or None.
        baselines: mean returns by name, such as random and untrained, drawn as horizontal lines.

    Raises:
        CheckpointError: the file cannot be written.
    """
    figure, (axes,) = _figure(1)
    steps = _column(metrics, "env_steps")
    low, high = _column(metrics, "return/p10"), _column(metrics, "return/p90")
    if np.isfinite(low).any():
        axes.fill_between(
            steps, low, high, color=BLUE, alpha=0.2, linewidth=0, label="training, 10% to 90% of episodes"
        )
    marker = "o" if len(metrics) == 1 else None
    if np.isfinite(steps).any():
        axes.plot(
            steps, _column(metrics, "return/mean"), color=BLUE, linewidth=2, marker=marker, label="training, mean"
        )
    validation = _column(metrics, "validation/mean")
    known = np.isfinite(validation)
    if known.any():
        axes.plot(
            steps[known],
            validation[known],
            "s-",
            color=VERMILION,
            linewidth=1.2,
            markersize=5,
            label="validation, greedy",
        )
    styles = [(GREEN, "--"), (ORANGE, "-."), (GREY, ":")]
    for (name, value), (color, style) in zip(baselines.items(), styles * len(baselines), strict=False):
        axes.axhline(value, color=color, linestyle=style, linewidth=1.5, label=f"{name} ({value:.0f})")
    if threshold is not None:
        axes.axhline(threshold, color="black", linestyle=(0, (1, 1)), linewidth=1.5, label=f"threshold ({threshold:g})")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return (sum of rewards of an episode)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    last = np.nanmax(steps) if np.isfinite(steps).any() else 1.0
    axes.set_xlim(0, 1.02 * max(last, 1.0))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3, frameon=False, fontsize=9)
    _save(figure, Path(path))


def return_histograms(
    before: Sequence[float], after: Sequence[float], random: Sequence[float], path: str | Path
) -> None:
    """Draw how the held-out returns are distributed, one row a policy, on one scale.

    Args:
        before: returns of the untrained model.
        after: returns of the trained model; empty where nothing was trained, and then without a row.
        random: returns of the random policy.
        path: the PNG file; replaced in one step.

    Raises:
        CheckpointError: the file cannot be written.
    """
    policies = {"random": (random, GREEN), "untrained": (before, ORANGE), "trained": (after, BLUE)}
    rows = {name: row for name, row in policies.items() if len(row[0])}
    figure, panels = _figure(len(rows))
    everything = np.concatenate([np.asarray(values, dtype=float) for values, _ in rows.values()])
    edges = np.histogram_bin_edges(everything, bins=40).tolist()
    for axes, (name, (values, color)) in zip(panels, rows.items(), strict=True):
        axes.hist(values, bins=edges, color=color, edgecolor="white", linewidth=0.5)
        mean = float(np.mean(values))
        axes.axvline(mean, color="black", linewidth=1.5)
        axes.set_title(f"{name}: mean {mean:.1f}, n = {len(values)}", loc="left", fontsize=10)
        axes.set_ylabel("episodes")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    panels[-1].set_xlabel("return on held-out seeds (sum of rewards of an episode; the black line is the mean)")
    _save(figure, Path(path))


def _figure(rows: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(rows, 1, 1)]
    panels += [figure.add_subplot(rows, 1, row, sharex=panels[0]) for row in range(2, rows + 1)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelbottom=axes is panels[-1])
    return figure, panels


def _column(metrics: Sequence[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    """Values of one key, (N,), NaN where it is absent or None."""
    values = [line.get(key) for line in metrics]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        # Without the software's version in it, equal runs write equal bytes.
        figure.savefig(temporary, format="png", metadata={"Software": None})
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}). Free some space or check its permissions"
        ) from error
