"""PPO of Stable-Baselines3 on CartPole-v1: `python experiments/bench/ppo.py observations=frames output=ppo.json`.

Default hyperparameters, on the four state numbers (one environment, as in its documentation) or on the frames that the
policy sees (eight environments of an eighth of the steps, so that an update has the default 2,048 steps too). Greedy play
on the run's own validation seeds gives the curve, on its held-out seeds the results.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from grpo_agents.config import EnvConfig, Section
from grpo_agents.envs import PromptEnv, make_env
from grpo_agents.optional import require
from grpo_agents.rl.episode import Prompt, VideoPart
from grpo_agents.run.command import run_command
from grpo_agents.run.config import parse
from grpo_agents.run.provenance import hardware, versions
from grpo_agents.run.seeding import SeedPanels
from grpo_agents.run.statistics import summarize

ENV = "CartPole-v1"
ROLLOUT = 2048
"""Steps in an update: the default `n_steps` of one environment."""
FRAME_ENVS = 8
VALIDATE_EVERY = 5
"""Updates between two validations, that is 10,240 environment steps."""


class PpoConfig(Section):
    """All settings of this script."""

    output: str = Field(description="JSON file to write")
    observations: Literal["state", "frames"] = Field("state", description="what PPO sees")
    seed: NonNegativeInt = Field(0, description="of PPO, and root of the validation and held-out panels")
    env_steps: PositiveInt = Field(100_000, description="budget; PPO finishes the update that reaches it")
    at: PositiveInt | None = Field(None, description="also play the held-out seeds once so many steps were played")
    episodes: PositiveInt = Field(100, description="held-out episodes")
    validation: PositiveInt = Field(32, description="validation episodes")


class FrameEnv(gym.ObservationWrapper[NDArray[np.uint8], int, Prompt]):
    """The frames of a `PromptEnv`'s prompt and nothing else: uint8 (3 * frames, height, width), the oldest first.

    Args:
        env: an environment whose prompts show one video and whose frames have a set size.
    """

    def __init__(self, env: PromptEnv[Any]):
        super().__init__(env)
        shape = self.observation(env.observation_space.sample()).shape
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def observation(self, observation: Prompt) -> NDArray[np.uint8]:
        (video,) = observation.visuals()
        assert isinstance(video, VideoPart)
        return np.ascontiguousarray(np.concatenate([frame.pixels for frame in video.frames], axis=2).transpose(2, 0, 1))


class SmallCnn(nn.Module):
    """Features of small frames; the default NatureCNN needs at least 36 pixels a side.

    Stable-Baselines3 hands over float32 in [0, 1]. White becomes 0 and black -3, as in the tiny Qwen-VL's processor:
    nearly all of a CartPole frame is white.

    Args:
        space: the observation space, (channels, height, width).
        features_dim: size of the output.
    """

    def __init__(self, space: spaces.Box, features_dim: int = 128):
        super().__init__()
        self.features_dim = features_dim
        channels = space.shape[0]
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=6, stride=4, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            size = self.convolutions(torch.zeros(1, *space.shape)).shape[1]
        self.head = nn.Sequential(nn.Linear(size, features_dim), nn.ReLU())

    def forward(self, observations: Tensor) -> Tensor:
        """(B, channels, height, width) to (B, features_dim)."""
        return self.head(self.convolutions(3.0 * (observations - 1.0)))


def make_frames() -> FrameEnv:
    """CartPole as the policy sees it."""
    return FrameEnv(make_env(EnvConfig(id=ENV)))


def make_state() -> gym.Env[Any, Any]:
    """CartPole as it is."""
    return gym.make(ENV)


def build(observations: str, seed: int) -> Any:
    """A PPO of Stable-Baselines3 with its default hyperparameters, on the CPU."""
    sb3 = require("stable_baselines3", "bench", "the PPO baseline")
    from stable_baselines3.common.env_util import make_vec_env

    if observations == "state":
        return sb3.PPO("MlpPolicy", ENV, seed=seed, device="cpu")
    envs = make_vec_env(make_frames, n_envs=FRAME_ENVS, seed=seed)
    kwargs = {"features_extractor_class": SmallCnn}
    return sb3.PPO("CnnPolicy", envs, n_steps=ROLLOUT // FRAME_ENVS, policy_kwargs=kwargs, seed=seed, device="cpu")


def greedy_returns(model: Any, make: Callable[[], gym.Env[Any, Any]], seeds: Sequence[int]) -> list[float]:
    """Return of one greedy episode from the reset of each seed, all played side by side."""
    envs = [make() for _ in seeds]
    observations = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    returns = [0.0] * len(envs)
    playing = list(range(len(envs)))
    while playing:
        actions, _ = model.predict(np.stack([observations[i] for i in playing]), deterministic=True)
        going_on = []
        for i, action in zip(playing, actions, strict=True):
            observations[i], reward, terminated, truncated, _ = envs[i].step(int(action))
            returns[i] += float(reward)
            if not (terminated or truncated):
                going_on.append(i)
        playing = going_on
    for env in envs:
        env.close()
    return returns


def run(config: PpoConfig) -> dict[str, Any]:
    """Train for the budget.

    Returns:
        curve (columns env_steps, return/mean, validation/mean); held_out, by moment: "at", "end" and "best" (the weights
        with the best validation), each a row of `summarize` with its env_steps; wall_s, without held-out play.
    """
    model = build(config.observations, config.seed)
    make = make_frames if config.observations == "frames" else make_state
    panels = SeedPanels(config.seed)
    validation, test = panels.validation(config.validation), panels.held_out(config.episodes)
    curve: dict[str, list[float | None]] = {"env_steps": [], "return/mean": [], "validation/mean": []}
    held_out: dict[str, dict[str, Any]] = {}
    best, best_steps, best_weights, seconds = -np.inf, 0, None, 0.0

    def record(moment: str, steps: int) -> None:
        held_out[moment] = {**summarize(greedy_returns(model, make, test)), "env_steps": steps}

    while (steps := int(model.num_timesteps)) < config.env_steps:
        begin = time.perf_counter()
        model.learn(ROLLOUT, reset_num_timesteps=False)
        steps = int(model.num_timesteps)
        mean = None
        if steps // ROLLOUT % VALIDATE_EVERY == 0 or steps >= config.env_steps:
            mean = float(np.mean(greedy_returns(model, make, validation)))
            if mean > best:
                best, best_steps, best_weights = mean, steps, copy.deepcopy(model.policy.state_dict())
        seconds += time.perf_counter() - begin
        training = [episode["r"] for episode in model.ep_info_buffer]
        curve["env_steps"].append(steps)
        curve["return/mean"].append(float(np.mean(training)) if training else None)
        curve["validation/mean"].append(mean)
        print(f"{steps} steps, {seconds:.0f} s, training {curve['return/mean'][-1]}, validation {mean}", flush=True)
        if config.at is not None and "at" not in held_out and steps >= config.at:
            record("at", steps)
    record("end", steps)
    model.policy.load_state_dict(best_weights)
    record("best", best_steps)
    return {
        "curve": curve,
        "held_out": held_out,
        "wall_s": round(seconds, 1),
        "versions": versions() | {"stable_baselines3": require("stable_baselines3", "bench", "PPO").__version__},
        "hardware": hardware(),
    }


def main(argv: list[str]) -> None:
    config = parse(PpoConfig, argv, prog="python experiments/bench/ppo.py", summary=__doc__ or "")
    Path(config.output).write_text(json.dumps(run(config)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command(main))
