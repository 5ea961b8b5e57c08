"""The registry of rewards, the two that every environment has, and their weighted sum."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from grpo_agents.config import RewardConfig
from grpo_agents.errors import ConfigError, GrpoAgentsError
from grpo_agents.rl.episode import EndReason, Episode

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
    if episode.end is EndReason.TERMINATED:
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
            problems.append(f"rewards: {config.name}: {error.args[0] if error.args else error}")
    if problems:
        raise ConfigError(problems)
    return found


def _resolve(name: str) -> Reward:
    if name in _registered:
        return _registered[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, _registered, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        known = ", ".join(sorted(_registered))
        raise LookupError(f"there is no such reward{hint} (known are {known}; your own is module:function)")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"a {type(function).__name__}, not a function of an episode")
    return function  # type: ignore[no-any-return]


def score(episode: Episode, rewards: Sequence[tuple[RewardConfig, Reward]]) -> None:
    """Grade an episode: fill `scores` with each reward by name, and `step_rewards` with their weighted sum by step.

    `step_rewards` stays None where a reward could not grade.

    Raises:
        GrpoAgentsError: a reward returned as many numbers as neither the episode nor its steps have, or none that is finite.
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
            raise GrpoAgentsError(
                f"reward {config.name!r} returned numbers of shape {by_step.shape} for an episode of {len(episode)} steps; "
                "return one number, or one for each step"
            )
        if not np.isfinite(by_step).all():
            raise GrpoAgentsError(
                f"reward {config.name!r} returned {value} for the episode of seed {episode.seed}; return None where it "
                "cannot grade"
            )
        episode.scores[config.name] = float(by_step.sum())
        total += config.weight * by_step
    episode.step_rewards = total if graded else None
