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
    gae_advantages,
    limit_bootstrap,
    return_to_go_advantages,
    returns_to_go,
    scale_by_std,
)
from grpo_agents.rl.episode import Encoded, EndReason, Episode, Group, Sample
from grpo_agents.rl.starts import ended_badly


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One reply and the advantage it is trained with.

    Attributes:
        logprobs: those of the reply's decisions under the learner before the update, (decisions,); None where the
            sampler's own count as such.
    """

    encoded: Encoded
    sample: Sample
    advantage: float
    logprobs: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class Credit:
    """The result of comparing groups.

    Attributes:
        steps: every step of every gradable episode, in order.
        flat: causes of the groups without a signal, and how many groups had each.
        groups: number of groups compared.
        explained_variance: share of the variance of the returns-to-go that the values foretold; None without values.
    """

    steps: list[TrainingStep]
    flat: Counter[str]
    groups: int
    explained_variance: float | None = None

    @property
    def flat_share(self) -> float:
        return sum(self.flat.values()) / self.groups if self.groups else 0.0


def assign_credit(groups: Sequence[Group], config: GroupConfig) -> Credit:
    """Compare the members of each group and give every step its advantage.

    Members that could not be graded are left out. See `grpo_agents.rl.advantages` for the formulas. The `gae` advantage
    needs the episodes' values (`grpo_agents.rl.processes.credit_of_all` estimates them).
    """
    flat: Counter[str] = Counter()
    members: list[list[Episode]] = []
    advantages: list[list[NDArray[np.float64]]] = []
    for group in groups:
        graded = comparable(group)
        if not graded:
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


def comparable(group: Group) -> list[Episode]:
    """The members that could be graded; none where they are fewer than two."""
    graded = [episode for episode in group.episodes if episode.step_rewards is not None and len(episode)]
    return graded if len(graded) > 1 else []


def outcomes(episode: Episode, gamma: float) -> NDArray[np.float64]:
    """Discounted return-to-go of each step of a graded episode, (T,); what a limit cut off is made up for."""
    assert episode.step_rewards is not None
    return returns_to_go(episode.step_rewards, gamma, _bootstrap(episode, gamma))


def _bootstrap(episode: Episode, gamma: float) -> float:
    assert episode.step_rewards is not None
    return 0.0 if episode.end is EndReason.TERMINATED else limit_bootstrap(episode.step_rewards, gamma)


def _compare(episodes: list[Episode], config: GroupConfig) -> tuple[list[NDArray[np.float64]], str | None]:
    rewards = [episode.step_rewards for episode in episodes if episode.step_rewards is not None]
    failed = np.array([ended_badly(episode) for episode in episodes])
    invalid = float(np.mean([not step.valid for episode in episodes for step in episode.steps]))
    if config.advantage == "episode":
        returns = np.array([r.sum() for r in rewards])
        by_member = episode_advantages(returns, normalize_std=config.normalize in (None, "group"))
        by_episode = [np.full(len(r), a) for r, a in zip(rewards, by_member, strict=True)]
        return by_episode, flat_group_cause(returns, failed, invalid)
    if config.advantage == "gae":
        by_episode = [_surprises(episode, config) for episode in episodes]
    else:
        by_episode = return_to_go_advantages(rewards, [_bootstrap(e, config.gamma) for e in episodes], config.gamma)
    firsts = np.array([outcomes(episode, config.gamma)[0] for episode in episodes])
    return by_episode, flat_group_cause(firsts, failed, invalid)


def _surprises(episode: Episode, config: GroupConfig) -> NDArray[np.float64]:
    assert episode.step_rewards is not None and episode.values is not None
    terminated = episode.end is EndReason.TERMINATED
    return gae_advantages(episode.step_rewards, episode.values, config.gamma, config.gae_lambda, terminated=terminated)


def scale_of(config: GroupConfig) -> str:
    """What advantages are divided by the standard deviation of: "batch", "group" or "none"."""
    return config.normalize or ("group" if config.advantage == "episode" else "batch")


def _normalize(advantages: list[list[NDArray[np.float64]]], config: GroupConfig) -> list[list[NDArray[np.float64]]]:
    scope = scale_of(config)
    if scope == "batch":
        flat = scale_by_std([values for group in advantages for values in group])
        rest = iter(flat)
        return [list(islice(rest, len(group))) for group in advantages]
    if scope == "group" and config.advantage != "episode":
        return [list(scale_by_std(group)) for group in advantages]
    return advantages
