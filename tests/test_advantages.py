"""Advantages against numbers worked out by hand."""

import warnings

import numpy as np
import pytest

from grpo_agents.rl.advantages import (
    episode_advantages,
    flat_group_cause,
    gae_advantages,
    limit_bootstrap,
    return_to_go_advantages,
    returns_to_go,
    scale_by_std,
)

NAN = float("nan")


def test_episode_advantages_by_hand() -> None:
    # Mean 3, squared deviations 4 + 1 + 0 + 9 = 14, sample variance 14 / 3.
    returns = np.array([1.0, 2.0, 3.0, 6.0])
    np.testing.assert_allclose(episode_advantages(returns, normalize_std=False), [-2.0, -1.0, 0.0, 3.0])
    std = (14.0 / 3.0) ** 0.5
    np.testing.assert_allclose(
        episode_advantages(returns, normalize_std=True, eps=0.5), [x / (std + 0.5) for x in (-2.0, -1.0, 0.0, 3.0)]
    )


def test_ungraded_member_is_left_out_of_mean_and_deviation() -> None:
    returns = np.array([1.0, NAN, 3.0])
    np.testing.assert_allclose(
        episode_advantages(returns, normalize_std=True, eps=0.0), [-1 / 2**0.5, NAN, 1 / 2**0.5], equal_nan=True
    )


@pytest.mark.parametrize(
    ("returns", "expected"),
    [([5.0, 5.0, 5.0], [0.0, 0.0, 0.0]), ([7.0], [0.0]), ([NAN, 7.0], [NAN, 0.0]), ([NAN, NAN], [NAN, NAN])],
)
def test_groups_without_a_spread_give_no_advantage_and_no_warning(returns: list[float], expected: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advantages = episode_advantages(np.array(returns), normalize_std=True)
    np.testing.assert_array_equal(advantages, expected)


def test_returns_to_go_by_hand() -> None:
    # From the end: 3 + 0.5 * 8 = 7, then 2 + 0.5 * 7 = 5.5, then 1 + 0.5 * 5.5 = 3.75.
    np.testing.assert_array_equal(returns_to_go(np.array([1.0, 2.0, 3.0]), 0.5, 8.0), [3.75, 5.5, 7.0])
    assert returns_to_go(np.array([]), 0.5, 8.0).shape == (0,)


def test_limit_bootstrap_extends_the_mean_reward_for_ever() -> None:
    assert limit_bootstrap(np.array([1.0, 3.0]), 0.5) == 4.0
    assert limit_bootstrap(np.array([1.0, 3.0]), 1.0) == 0.0
    assert limit_bootstrap(np.array([]), 0.5) == 0.0
    # With a constant reward the bootstrap makes every step's return-to-go the same: a limit leaves no trace.
    rewards = np.ones(7)
    np.testing.assert_allclose(returns_to_go(rewards, 0.9, limit_bootstrap(rewards, 0.9)), np.full(7, 10.0))


def test_leave_one_out_advantages_of_a_failure_a_limit_and_an_early_failure() -> None:
    # gamma 0.5, reward 1. Returns-to-go, with what an ended member counts as in brackets:
    #   a fails after 3 steps:                    1.75  1.5  1
    #   b is cut after 2, bootstrap 1 / 0.5 = 2:  2     2    [2]
    #   c fails after 1:                          1     [0]  [0]
    advantages = return_to_go_advantages([np.ones(3), np.ones(2), np.ones(1)], [0.0, 2.0, 0.0], 0.5)
    np.testing.assert_allclose(advantages[0], [1.75 - (2 + 1) / 2, 1.5 - (2 + 0) / 2, 1 - (2 + 0) / 2])
    np.testing.assert_allclose(advantages[1], [2 - (1.75 + 1) / 2, 2 - (1.5 + 0) / 2])
    np.testing.assert_allclose(advantages[2], [1 - (1.75 + 2) / 2])


def test_a_group_of_one_keeps_its_return_to_go() -> None:
    (advantages,) = return_to_go_advantages([np.array([1.0, 1.0])], [0.0], 0.5)
    np.testing.assert_array_equal(advantages, [1.5, 1.0])
    assert return_to_go_advantages([], [], 0.5) == []


def test_the_order_of_members_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=length) for length in (4, 1, 6, 3)]
    bootstraps = [0.0, 2.0, 0.0, -1.0]
    straight = return_to_go_advantages(rewards, bootstraps, 0.9)
    backward = return_to_go_advantages(rewards[::-1], bootstraps[::-1], 0.9)
    for one, other in zip(straight, backward[::-1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_scale_by_std_keeps_signs_and_leaves_flat_batches_alone() -> None:
    # Mean 2.5 of 1, 2, 3, 4; population variance 1.25.
    scaled = scale_by_std([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
    np.testing.assert_allclose(np.concatenate(scaled), np.array([1.0, 2.0, 3.0, 4.0]) / 1.25**0.5)
    for flat in (np.zeros(3), np.full(3, 2.0), np.array([1e-12, -1e-12])):
        np.testing.assert_array_equal(scale_by_std([flat])[0], flat)
    assert scale_by_std([]) == []


@pytest.mark.parametrize(
    ("returns", "failed", "invalid_share", "cause"),
    [
        ([5.0, 5.0], [False, False], 0.0, "all_solved"),
        ([5.0, 5.0], [True, True], 0.5, "all_failed"),
        ([5.0, 5.0], [True, True], 1.0, "all_invalid"),
        ([5.0, 5.0], [True, False], 0.0, "mixed_ends"),
        ([5.0, NAN], [True, False], 0.0, "all_failed"),
        ([NAN, NAN], [False, False], 0.0, "ungraded"),
        ([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], [True, True], 0.0, "all_failed"),
        ([5.0, 6.0], [True, True], 1.0, None),
    ],
)
def test_flat_group_cause(returns: list[float], failed: list[bool], invalid_share: float, cause: str | None) -> None:
    assert flat_group_cause(np.array(returns), np.array(failed), invalid_share) == cause


@pytest.mark.parametrize(
    ("terminated", "expected"),
    [
        # gamma 0.5, lambda 0.5. Surprises: 1 + 0.5 * 4 - 2 = 1, 1 + 0.5 * 8 - 4 = 1, and 1 - 8 = -7 at an end,
        # 1 + 0.5 * 8 - 8 = -3 at a limit. From the end on: 1 - 7 / 4 = -0.75, 1 - 0.75 / 4; 1 - 3 / 4, 1 + 0.25 / 4.
        (True, [0.8125, -0.75, -7.0]),
        (False, [1.0625, 0.25, -3.0]),
    ],
)
def test_gae_by_hand(terminated: bool, expected: list[float]) -> None:
    values = np.array([2.0, 4.0, 8.0])
    np.testing.assert_array_equal(gae_advantages(np.ones(3), values, 0.5, 0.5, terminated=terminated), expected)


def test_gae_of_lambda_1_is_the_outcome_less_its_value_and_of_lambda_0_one_surprise() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=9), rng.normal(size=9)
    outcome = gae_advantages(rewards, values, 0.9, 1.0, terminated=False)
    np.testing.assert_allclose(outcome, returns_to_go(rewards, 0.9, values[-1]) - values)
    surprise = gae_advantages(rewards, values, 0.9, 0.0, terminated=True)
    np.testing.assert_allclose(surprise, rewards + 0.9 * np.append(values[1:], 0.0) - values)
