"""The experiment page, written from the results. Only its last section is written by hand, and it is kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.results import Record

BY_HAND = "## What we learned"
NOTHING_YET = f"{BY_HAND}\n\nNothing is measured yet.\n"
TARGET = 475.0
TRAINED = {
    "default": "GRPO, default",
    "return_to_go": "GRPO, `group.advantage=return_to_go`",
    "episode": "GRPO, `group.advantage=episode`",
    "reset": "GRPO, `group.start=reset`",
}
PPO = {"ppo-state": "state (4 numbers), `MlpPolicy`", "ppo-frames": "frames (2 of 96x32), `CnnPolicy`"}
MOMENTS = {"at": "at the default run's steps", "end": "at the end of the budget", "best": "best by validation"}
STAGES = {
    "rendering": "rendering (draw, crop, resize)",
    "environment": "environment without rendering",
    "encoding": "prompts to tokens",
    "model": "model: vision and language passes",
    "sampler": "sampler without the model",
    "other": "snapshots, event loop, records",
}


def compose(parts: dict[str, Record], figure: str | None, by_hand: str) -> str:
    """The page's text.

    Args:
        parts: records by name.
        figure: the picture's path as seen from the page; None where there is nothing to draw.
        by_hand: the last section, from its heading on.
    """
    sections = [_head(parts), _grpo(parts), _ppo(parts), _curve(figure), _shares(parts), _throughput(parts), by_hand]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def write_page(parts: dict[str, Record], page: Path, figure: Path) -> None:
    """Write the page anew, its hand-written section as it was."""
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    start = old.find(f"\n{BY_HAND}\n")
    by_hand = old[start + 1 :] if start >= 0 else NOTHING_YET
    link = Path(os.path.relpath(figure, page.parent)).as_posix() if figure.exists() else None
    page.write_text(compose(parts, link, by_hand), encoding="utf-8")


def _head(parts: dict[str, Record]) -> str:
    lines = [
        "# CartPole-v1 from frames",
        "Written by `python experiments/bench_cartpole.py` from `experiments/results/cartpole.json`; by hand is only the "
        "last section. Settings: [cartpole.yaml](cartpole.yaml).",
    ]
    means = [(record["seed"], record["summary"]["trained"]["mean"]) for _, record in _of(parts, "default")]
    if means:
        listed = ", ".join(f"{mean:.1f} (seed {seed})" for seed, mean in means)
        reached = sum(mean >= TARGET for _, mean in means)
        lines.append(
            f"Held-out mean of the default command: {listed}; {reached} of {len(means)} at {TARGET:g} or more. The threshold "
            "of the environment is 475, the most that can be reached is 500."
        )
    for _, record in _of(parts, "default")[:1]:
        hardware, versions = record["summary"]["hardware"], record["summary"]["versions"]
        lines.append(f"    {_without_name(record['command'])}")
        lines.append(
            f"Measured on {hardware['cpus']} CPU cores ({hardware['machine']}; GPU: {hardware['gpu'] or 'none'}), with "
            + ", ".join(f"{package} {version}" for package, version in versions.items())
            + "."
        )
    return "\n\n".join(lines)


def _grpo(parts: dict[str, Record]) -> str:
    rows = []
    for baseline in ("random", "untrained"):
        for _, record in _of(parts, "default"):
            summary = record["summary"].get(baseline)
            rows.append([f"{baseline} policy", record["seed"], _mean(summary), "", "", "", ""])
    for family, title in TRAINED.items():
        for _, record in _of(parts, family):
            summary = record["summary"]
            rows.append(
                [
                    title,
                    record["seed"],
                    _mean(summary.get("trained")),
                    f"{summary['env_steps']:,}",
                    _time(summary["wall_s"]),
                    "yes" if summary["solved"] else "no",
                    _conditions(record),
                ]
            )
    if not rows:
        return ""
    header = ["policy", "seed", "held-out mean [95% interval]", "env steps", "wall time (min:s)", "solved", "ran"]
    budgets = {record["env_steps"] for family in TRAINED for _, record in _of(parts, family)}
    budget = "".join(
        f" All have the default's budget of {steps:,} environment steps, over which the learning rate falls."
        for steps in sorted(budgets)
    )
    return (
        "## GRPO\n\n"
        + _table(header, rows)
        + "\n\nGreedy play of the adapter with the best validation, on held-out seeds that "
        "nothing else used; bootstrap intervals over episodes. Wall time is that of the whole command after the model is loaded: "
        "training, validation and held-out play. Solved: the interval of greedy play over all validation seeds lay at 475 or "
        "above, and the run stopped there. Default: `group.advantage=gae group.start=restart`." + budget
    )


def _ppo(parts: dict[str, Record]) -> str:
    rows = []
    for family, title in PPO.items():
        for _, record in _of(parts, family):
            cells = []
            for moment in MOMENTS:
                row = record["held_out"].get(moment)
                cells.append(f"{_mean(row)} at {row['env_steps']:,}" if row else "not played")
            curve = record["curve"]
            solved = [
                steps
                for steps, mean in zip(curve["env_steps"], curve["validation/mean"], strict=True)
                if mean is not None and mean >= TARGET
            ]
            first = f"{solved[0]:,}" if solved else "never"
            rows.append([title, record["seed"], *cells, first, _time(record["wall_s"]), _conditions(record)])
    if not rows:
        return ""
    header = ["observations", "seed", *MOMENTS.values(), "validation first at 475", "wall time (min:s)", "ran"]
    return (
        "## PPO beside it\n\n"
        + _table(header, rows)
        + "\n\nStable-Baselines3 with default hyperparameters, greedy play on "
        "the same held-out seeds as the GRPO run of the same seed. State: one environment. Frames: the two frames that the "
        "policy sees, stacked as six channels, taken by the same fast capture; eight environments of 256 steps (2,048 steps "
        "an update, as by default); convolutions of 6x6 (16 filters, stride 4) and 3x3 (32, stride 2) and a linear layer "
        "of 128 instead of NatureCNN, which needs frames of at least 36 pixels a side; pixels centred on white as the "
        "tiny model's processor does. PPO starts from random weights; the policy of GRPO has learned to describe frames. "
        "Wall time is that of training and validation."
    )


def _curve(figure: str | None) -> str:
    return "" if figure is None else f"## Learning curves\n\n![return against environment steps]({figure})"


def _shares(parts: dict[str, Record]) -> str:
    runs = _of(parts, "default")
    blocks = []
    if runs:
        columns = [time_shares(record) for _, record in runs]
        rows = [[stage, *(f"{column[stage]:.0%}" for column in columns)] for stage in columns[0]]
        header = ["share of the wall time", *(f"seed {record['seed']}" for _, record in runs)]
        blocks.append("Default runs:\n\n" + _table(header, rows))
    if "rendering" in parts:
        frame, play = parts["rendering"]["frame"], parts["rendering"]["play"]
        blocks.append(
            f"Play of 64 episodes with the untrained policy ({play['steps']:,} steps, {play['ms_per_step']:.2f} ms a step, "
            f"{_conditions(parts['rendering'])}):\n\n"
            + _table(
                ["share of play", ""], [[STAGES[stage], f"{share:.0%}"] for stage, share in play["shares"].items()]
            )
            + f"\n\nA frame takes {frame['capture_ms']:.2f} ms, cropped and resized; `render()` alone takes "
            f"{frame['render_ms']:.2f} ms in the same states, {frame['ratio']:.1f} times as long."
        )
    return "## Where the time goes\n\n" + "\n\n".join(blocks) if blocks else ""


def time_shares(record: Record) -> dict[str, float]:
    """Shares of a run's wall time by stage, which add up to 1.

    Args:
        record: of a training run: its curve's time/* columns are seconds of each update.
    """
    curve, wall = record["curve"], record["summary"]["wall_s"]
    phases = ("play", "sample", "model", "update", "validate")
    spent = {phase: sum(value or 0.0 for value in curve.get(f"time/{phase}", ())) for phase in phases}
    stages = {
        "play: environments, rendering, prompts": spent["play"] - spent["sample"],
        "play: model": spent["model"],
        "play: sampler without the model": spent["sample"] - spent["model"],
        "update": spent["update"],
        "validation": spent["validate"],
    }
    stages["held-out play of three policies, saving, logging"] = wall - sum(stages.values())
    return {stage: seconds / wall for stage, seconds in stages.items()}


def _throughput(parts: dict[str, Record]) -> str:
    if "throughput" not in parts:
        return ""
    record = parts["throughput"]
    header = ["waiting", "sampler", "bare forward", "minimal forward", "sampler / bare", "sampler / minimal"]
    rows = [
        [
            row["waiting"],
            *(f"{row[f'{way}_per_s']:,.0f}/s" for way in ("sampler", "bare", "minimal")),
            f"{row['of_bare']:.0%}",
            f"{row['of_minimal']:.0%}",
        ]
        for row in record["rows"]
    ]
    return (
        "## Sampling against the bare forward pass\n\n"
        + _table(header, rows)
        + "\n\nReplies a second for prompts with frames "
        f"never seen before, medians of {record['repeats']} interleaved repeats ({_conditions(record)}). Bare: transformers' "
        "forward of the whole prompts on ready-made inputs, positions given. Minimal: the project's own vision and language "
        "passes on a ready-made batch with the prefix known. The sampler's time also holds hashing frames, cutting them into "
        "patches, batching and drawing. Aim: 70% of bare at 64."
    )


def _of(parts: dict[str, Record], family: str) -> list[tuple[str, Record]]:
    found = [(name, record) for name, record in parts.items() if name.rpartition("-")[0] == family]
    return sorted(found, key=lambda item: item[1]["seed"])


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _mean(row: dict[str, float] | None) -> str:
    return "not played" if row is None else f"{row['mean']:.1f} [{row['ci_low']:.1f}, {row['ci_high']:.1f}]"


def _time(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _conditions(record: Record) -> str:
    threads = "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"
    return threads if record["jobs"] == 1 else f"{threads}, {record['jobs']} runs side by side"


def _without_name(command: str) -> str:
    return " ".join(word for word in command.split() if not word.startswith(("name=", "seed=")))
