"""The registry of rewards, the two that every environment has, and their weighted sum."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from grpo_agents.config import RewardConfig
from grpo_agents.errors import ConfigError
from grpo_agents.rl.episode import Episode

Reward = Callable[[Episode], float | Sequence[float] | NDArray[np.float64] | None]

_registered: dict[str, Reward] = {}


def register_reward(name: str) -> Callable[[Reward], Reward]:
    """Decorator: make a reward known by name; a later one of the same name replaces it."""

    def register(function: Reward) -> Reward:
        _registered[name] = function
        return function

    return register


@register_reward("return")
def environment_return(episode: Episode) -> NDArray[np.float64]:
    """The environment's own rewards, step by step."""
    return episode.rewards


@register_reward("survival")
def survival(episode: Episode) -> NDArray[np.float64]:
    """1 for each step after which the episode went on or was cut by a limit, 0 for one that ended it."""
    alive = np.ones(len(episode))
    if episode.failed and len(alive):
        alive[-1] = 0.0
    return alive


def resolve_rewards(configs: Sequence[RewardConfig]) -> list[tuple[RewardConfig, Reward]]:
    """Find the functions behind the configured names.

    Raises:
        ConfigError: an unknown name (with the closest known one), or a dotted path that leads nowhere.
    """
    found, problems = [], []
    for config in configs:
        try:
            found.append((config, _resolve(config.name)))
        except (LookupError, ImportError, AttributeError, TypeError) as error:
            problems.append(f"rewards: {error.args[0] if error.args else error}")
    if problems:
        raise ConfigError(problems)
    return found


def _resolve(name: str) -> Reward:
    if name in _registered:
        return _registered[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, _registered, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise LookupError(
            f"there is no reward {name!r}{hint} Known are {', '.join(sorted(_registered))}; your own is module:function"
        )
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function of an episode")
    return function  # type: ignore[no-any-return]


def score(episode: Episode, rewards: Sequence[tuple[RewardConfig, Reward]]) -> None:
    """Grade an episode: fill `scores` with each reward by name, and `step_rewards` with their weighted sum by step.

    `step_rewards` stays None where a reward could not grade.

    Raises:
        ValueError: a reward returned as many numbers as neither the episode nor its steps have.
    """
    total = np.zeros(len(episode))
    graded = True
    for config, reward in rewards:
        value = reward(episode)
        if value is None:
            episode.scores[config.name] = None
            graded = False
            continue
        by_step = np.asarray(value, dtype=np.float64)
        if by_step.ndim == 0:
            by_step = np.concatenate([np.zeros(len(episode) - 1), by_step[None]])
        if by_step.shape != total.shape:
            raise ValueError(
                f"reward {config.name!r} returned {by_step.shape[0]} numbers for an episode of {len(episode)} steps; return "
                "one number, or one for each step"
            )
        episode.scores[config.name] = float(by_step.sum())
        total += config.weight * by_step
    episode.step_rewards = total if graded else None
