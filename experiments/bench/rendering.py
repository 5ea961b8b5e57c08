"""What playing costs apart from learning: `python experiments/bench/rendering.py output=rendering.json`.

First the time of one frame of CartPole-v1 in random states: by `Capture` (drawn, cropped, resized) and by `render()` alone.
Then 64 episodes played as in training, with a clock around each stage.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from pydantic import Field, PositiveInt

from grpo_agents.agent import Agent
from grpo_agents.config import EnvConfig, PolicyConfig, SamplerConfig, Section
from grpo_agents.envs import PromptEnv
from grpo_agents.envs.capture import Capture
from grpo_agents.envs.registry import prompt_settings
from grpo_agents.rl.rollout import Rollouts
from grpo_agents.rl.starts import Start
from grpo_agents.run.command import run_command
from grpo_agents.run.config import parse
from grpo_agents.run.provenance import hardware, versions

TRAIL = 200
"""Steps back that snapshots reach, as in training."""


class RenderingConfig(Section):
    """All settings of this script."""

    output: str = Field(description="JSON file to write")
    frames: PositiveInt = Field(300, description="random states that are drawn")
    episodes: PositiveInt = Field(64, description="episodes played side by side")
    repeats: PositiveInt = Field(3, description="times they are played; the shares are those of all together")


def frame_times(count: int) -> dict[str, float]:
    """Median milliseconds of one frame, by `capture` and by `render`, and how many times faster the former is."""
    config = EnvConfig()
    drawn, rendered = (gym.make(config.id, render_mode="rgb_array") for _ in range(2))
    capture = Capture(drawn, prompt_settings(config).frames)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"capture": [], "render": []}
    for env in (drawn, rendered):
        env.reset(seed=0)
    for _ in range(count):
        state = rng.uniform([-2.4, -2.0, -0.2, -2.0], [2.4, 2.0, 0.2, 2.0])
        for name, env, look in (("capture", drawn, capture.frame), ("render", rendered, rendered.render)):
            env.unwrapped.state = state  # type: ignore[attr-defined]
            begin = time.perf_counter()
            look()
            times[name].append(time.perf_counter() - begin)
    drawn.close()
    rendered.close()
    medians = {f"{name}_ms": 1000 * statistics.median(values) for name, values in times.items()}
    return {**medians, "ratio": medians["render_ms"] / medians["capture_ms"]}


@contextmanager
def clocked(owner: type, name: str, spent: dict[str, float], stage: str) -> Iterator[None]:
    """Within this context every call of a class's method adds its wall time to `spent[stage]`."""
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[stage] += time.perf_counter() - begin

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, method)


def play_shares(episodes: int, repeats: int) -> dict[str, Any]:
    """Shares of the wall time of play with the untrained policy.

    Returns:
        steps, ms_per_step, and shares: rendering, environment (steps and resets without rendering), encoding (prompts to
        tokens), model (vision and language passes), sampler (the rest of it: hashes, batches, drawing), other (snapshots,
        event loop, records).
    """
    agent = Agent.build(EnvConfig(), PolicyConfig(), SamplerConfig(), snapshots=True)
    spent = dict.fromkeys(("rendering", "environment", "encoding"), 0.0)
    encode: Callable[..., Any] = agent.play.encode

    def timed_encode(prompt: Any) -> Any:
        begin = time.perf_counter()
        encoded = encode(prompt)
        spent["encoding"] += time.perf_counter() - begin
        return encoded

    rollouts = Rollouts(replace(agent.play, encode=timed_encode), trail=TRAIL)

    def play(first_seed: int) -> int:
        starts = [Start(first_seed + i) for i in range(episodes)]
        rngs = [np.random.default_rng(start.seed) for start in starts]
        return sum(len(episode) for episode, _ in rollouts.episodes(starts, rngs))

    play(0)  # makes the environments and fills the caches, as an earlier update has
    agent.sampler.statistics()
    spent.update(dict.fromkeys(spent, 0.0))
    begin = time.perf_counter()
    with (
        clocked(Capture, "frame", spent, "rendering"),
        clocked(PromptEnv, "step", spent, "environment"),
        clocked(PromptEnv, "reset", spent, "environment"),
    ):
        steps = sum(play(1000 * (repeat + 1)) for repeat in range(repeats))
    total = time.perf_counter() - begin
    rollouts.close()
    counts = agent.sampler.statistics()
    spent["environment"] -= spent["rendering"]
    spent |= {"model": counts["model_seconds"], "sampler": counts["seconds"] - counts["model_seconds"]}
    spent["other"] = total - sum(spent.values())
    shares = {stage: value / total for stage, value in spent.items()}
    return {"steps": steps, "ms_per_step": 1000 * total / steps, "shares": shares}


def run(config: RenderingConfig) -> dict[str, Any]:
    """Measure both."""
    return {
        "frame": frame_times(config.frames),
        "play": play_shares(config.episodes, config.repeats),
        "versions": versions(),
        "hardware": hardware(),
    }


def main(argv: list[str]) -> None:
    config = parse(RenderingConfig, argv, prog="python experiments/bench/rendering.py", summary=__doc__ or "")
    Path(config.output).write_text(json.dumps(run(config)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command(main))
