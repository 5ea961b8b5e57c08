"""Named rewards, their weighted sum, and what cannot be graded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from worlds import episode_of

from grpo_agents.config import RewardConfig
from grpo_agents.errors import ConfigError, GrpoAgentsError
from grpo_agents.rewards import Reward, register_reward, resolve_rewards, score
from grpo_agents.rewards.registry import _registered
from grpo_agents.rl.episode import EndReason, Episode


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    kept = dict(_registered)
    yield
    _registered.clear()
    _registered.update(kept)


def graded(episode: Episode, *rewards: tuple[str, float]) -> Episode:
    score(episode, resolve_rewards([RewardConfig(name=name, weight=weight) for name, weight in rewards]))
    return episode


def half_of_the_steps(episode: Episode) -> float:
    """A reward of a user's own module."""
    return len(episode) / 2


def no_opinion(episode: Episode) -> None:
    """A reward that cannot grade."""


NOT_A_FUNCTION = 3


def test_return_is_the_environments_own_reward() -> None:
    episode = graded(episode_of([1.0, -2.0, 0.5]), ("return", 1.0))
    assert episode.step_rewards is not None
    assert episode.step_rewards.tolist() == [1.0, -2.0, 0.5]
    assert episode.scores == {"return": -0.5}


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (EndReason.TERMINATED, [1.0, 1.0, 0.0]),
        (EndReason.TRUNCATED, [1.0, 1.0, 1.0]),
        (EndReason.STOPPED, [1.0, 1.0, 1.0]),
    ],
)
def test_survival_counts_the_steps_that_did_not_end_the_episode(end: EndReason, expected: list[float]) -> None:
    episode = graded(episode_of([-9.0] * 3, end), ("survival", 1.0))
    assert episode.step_rewards is not None
    assert episode.step_rewards.tolist() == expected


def test_rewards_are_summed_by_weight_and_one_number_is_for_the_last_step() -> None:
    episode = graded(
        episode_of([1.0, 2.0, 3.0]), ("return", 1.0), ("survival", -0.5), ("test_rewards:half_of_the_steps", 10.0)
    )
    assert episode.step_rewards is not None
    assert episode.step_rewards.tolist() == [1.0 - 0.5, 2.0 - 0.5, 3.0 + 10.0 * 1.5]
    assert episode.scores == {"return": 6.0, "survival": 2.0, "test_rewards:half_of_the_steps": 1.5}


def test_one_reward_that_cannot_grade_leaves_the_episode_ungraded_and_the_others_on_record() -> None:
    episode = graded(episode_of([1.0, 2.0]), ("test_rewards:no_opinion", 1.0), ("return", 1.0))
    assert episode.step_rewards is None
    assert episode.scores == {"test_rewards:no_opinion": None, "return": 3.0}


def test_a_registered_reward_is_found_by_its_name_and_the_later_one_is_taken() -> None:
    for value in (1.0, 2.0):

        @register_reward("constant")
        def constant(episode: Episode, value: float = value) -> list[float]:
            return [value] * len(episode)

    assert graded(episode_of([0.0, 0.0]), ("constant", 1.0)).scores == {"constant": 4.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [1.0, 2.0],
            r"reward 'mine' returned numbers of shape \(2,\) for an episode of 3 steps; return one number, or",
        ),
        (np.ones((3, 1)), r"reward 'mine' returned numbers of shape \(3, 1\) for an episode of 3 steps"),
        (float("nan"), "reward 'mine' returned nan for the episode of seed 7; return None where it cannot grade"),
        ([0.0, 0.0, np.inf], "reward 'mine' returned .*inf.* for the episode of seed 7"),
    ],
)
def test_what_is_no_grade_is_refused(value: Any, message: str) -> None:
    mine: Reward = lambda episode: value  # noqa: E731
    with pytest.raises(GrpoAgentsError, match=message):
        score(episode_of([1.0] * 3), [(RewardConfig(name="mine"), mine)])


def test_all_names_that_lead_nowhere_are_told_at_once() -> None:
    names = [
        "retrun",
        "xyzzy",
        "no_such_module:f",
        "test_rewards:no_such_function",
        "test_rewards:NOT_A_FUNCTION",
        "return",
    ]
    with pytest.raises(ConfigError) as raised:
        resolve_rewards([RewardConfig(name=name) for name in names])
    assert raised.value.problems == [
        "rewards: retrun: there is no such reward, did you mean 'return'? (known are return, survival; your own is "
        "module:function)",
        "rewards: xyzzy: there is no such reward (known are return, survival; your own is module:function)",
        "rewards: no_such_module:f: No module named 'no_such_module'",
        "rewards: test_rewards:no_such_function: module 'test_rewards' has no attribute 'no_such_function'",
        "rewards: test_rewards:NOT_A_FUNCTION: a int, not a function of an episode",
    ]
