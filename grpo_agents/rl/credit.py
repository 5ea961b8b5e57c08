"""From graded groups to the steps that are trained on, each with its advantage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from grpo_agents.config import GroupConfig
from grpo_agents.rl.advantages import (
    episode_advantages,
    flat_group_cause,
    limit_bootstrap,
    return_to_go_advantages,
    returns_to_go,
    scale_by_std,
)
from grpo_agents.rl.episode import Encoded, EndReason, Episode, Group, Sample
from grpo_agents.rl.starts import ended_badly


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One reply and the advantage it is trained with."""

    encoded: Encoded
    sample: Sample
    advantage: float


@dataclass(frozen=True, eq=False)
class Credit:
    """The result of comparing groups.

    Attributes:
        steps: every step of every gradable episode, in order.
        flat: causes of the groups without a signal, and how many groups had each.
        groups: number of groups compared.
    """

    steps: list[TrainingStep]
    flat: Counter[str]
    groups: int

    @property
    def flat_share(self) -> float:
        return sum(self.flat.values()) / self.groups if self.groups else 0.0


def assign_credit(groups: Sequence[Group], config: GroupConfig) -> Credit:
    """Compare the members of each group and give every step its advantage.

    Members that could not be graded are left out. See `grpo_agents.rl.advantages` for the formulas.
    """
    flat: Counter[str] = Counter()
    members: list[list[Episode]] = []
    advantages: list[list[NDArray[np.float64]]] = []
    for group in groups:
        graded = [episode for episode in group.episodes if episode.step_rewards is not None and len(episode)]
        if len(graded) < 2:
            flat["ungraded"] += 1
            continue
        by_episode, cause = _compare(graded, config)
        if cause is not None:
            flat[cause] += 1
        members.append(graded)
        advantages.append(by_episode)
    scaled = _normalize(advantages, config)
    steps = [
        TrainingStep(step.encoded, step.sample, float(advantage))
        for graded, by_episode in zip(members, scaled, strict=True)
        for episode, values in zip(graded, by_episode, strict=True)
        for step, advantage in zip(episode.steps, values, strict=True)
    ]
    return Credit(steps, flat, len(groups))


def _compare(episodes: list[Episode], config: GroupConfig) -> tuple[list[NDArray[np.float64]], str | None]:
    rewards = [episode.step_rewards for episode in episodes if episode.step_rewards is not None]
    failed = np.array([ended_badly(episode) for episode in episodes])
    invalid = float(np.mean([not step.valid for episode in episodes for step in episode.steps]))
    if config.advantage == "episode":
        returns = np.array([r.sum() for r in rewards])
        by_member = episode_advantages(returns, normalize_std=config.normalize in (None, "group"))
        by_episode = [np.full(len(r), a) for r, a in zip(rewards, by_member, strict=True)]
        return by_episode, flat_group_cause(returns, failed, invalid)
    bootstraps = [
        0.0 if episode.end is EndReason.TERMINATED else limit_bootstrap(r, config.gamma)
        for episode, r in zip(episodes, rewards, strict=True)
    ]
    outcomes = np.array([returns_to_go(r, config.gamma, b)[0] for r, b in zip(rewards, bootstraps, strict=True)])
    by_episode = return_to_go_advantages(rewards, bootstraps, config.gamma)
    return by_episode, flat_group_cause(outcomes, failed, invalid)


def _normalize(advantages: list[list[NDArray[np.float64]]], config: GroupConfig) -> list[list[NDArray[np.float64]]]:
    scope = config.normalize or ("batch" if config.advantage == "return_to_go" else "group")
    if scope == "batch":
        flat = scale_by_std([values for group in advantages for values in group])
        rest = iter(flat)
        return [list(islice(rest, len(group))) for group in advantages]
    if scope == "group" and config.advantage == "return_to_go":
        return [list(scale_by_std(group)) for group in advantages]
    return advantages
