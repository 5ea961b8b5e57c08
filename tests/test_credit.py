"""Groups become training steps and metrics, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from worlds import episode_of

from grpo_agents.config import GroupConfig
from grpo_agents.rl.credit import assign_credit
from grpo_agents.rl.episode import EndReason, Episode, Group
from grpo_agents.rl.episode_metrics import credit_metrics, episode_metrics

TERMINATED, TRUNCATED, STOPPED = EndReason.TERMINATED, EndReason.TRUNCATED, EndReason.STOPPED


def settings(advantage: str = "return_to_go", normalize: str | None = "none", gamma: float = 0.5) -> GroupConfig:
    return GroupConfig.model_validate({"advantage": advantage, "normalize": normalize, "gamma": gamma})


def advantages(groups: list[list[Episode]], config: GroupConfig) -> list[float]:
    return [step.advantage for step in assign_credit([Group(members) for members in groups], config).steps]


def a_fall_and_a_limit(end: EndReason) -> list[Episode]:
    return [episode_of([1.0, 1.0]), episode_of([1.0], end, member=1)]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        # Discount 0.5. The first member falls after two steps: 1.5, 1.
        # The second falls after one step: 1, and then counts as 0.
        (TERMINATED, [1.5 - 1.0, 1.0 - 0.0, 1.0 - 1.5]),
        # The second is cut after one step, and would go on earning 1 a step, worth 2: 1 + 0.5 * 2 = 2, then 2.
        (TRUNCATED, [1.5 - 2.0, 1.0 - 2.0, 2.0 - 1.5]),
        (STOPPED, [1.5 - 2.0, 1.0 - 2.0, 2.0 - 1.5]),
    ],
)
def test_return_to_go_takes_the_value_of_going_on_at_a_limit_and_nothing_at_an_end(
    end: EndReason, expected: list[float]
) -> None:
    np.testing.assert_allclose(advantages([a_fall_and_a_limit(end)], settings()), expected, rtol=1e-12)


def test_a_reached_goal_is_an_end_as_well() -> None:
    # Discount 0.5, -1 a step. Arrived after two steps: -1.5, -1. Cut after one: -1 + 0.5 * -2 = -2, then -2.
    members = [episode_of([-1.0, -1.0]), episode_of([-1.0], TRUNCATED, member=1)]
    np.testing.assert_allclose(advantages([members], settings()), [-1.5 + 2.0, -1.0 + 2.0, -2.0 + 1.5], rtol=1e-12)


def test_episode_advantages_are_the_same_at_every_step() -> None:
    members = [episode_of([1.0, 1.0, 1.0]), episode_of([1.0], member=1), episode_of([2.0], member=2)]
    # Returns 3, 1, 2: mean 2, sample deviation 1.
    centred = [1.0, 1.0, 1.0, -1.0, 0.0]
    np.testing.assert_allclose(advantages([members], settings("episode", "none")), centred, rtol=1e-12)
    for scope in (None, "group"):
        scaled = np.array(centred) / (1.0 + 1e-6)
        np.testing.assert_allclose(advantages([members], settings("episode", scope)), scaled, rtol=1e-12)


def two_groups() -> list[list[Episode]]:
    """Of return-to-go advantages 0.5, 1, -0.5, and twice as large ones."""
    return [a_fall_and_a_limit(TERMINATED), [episode_of([2.0, 2.0]), episode_of([2.0], member=1)]]


PLAIN = np.array([0.5, 1.0, -0.5])


@pytest.mark.parametrize(
    ("scope", "first", "second"),
    [
        ("none", PLAIN, 2 * PLAIN),
        # Population deviation of 0.5, 1, -0.5: mean 1/3, mean square 1/2, variance 1/2 - 1/9 = 7/18.
        ("group", PLAIN / (7 / 18) ** 0.5, PLAIN / (7 / 18) ** 0.5),
        # Of all six: mean 1/2, mean square 5/4, variance 5/4 - 1/4 = 1.
        ("batch", PLAIN, 2 * PLAIN),
        (None, PLAIN, 2 * PLAIN),
    ],
)
def test_return_to_go_is_scaled_by_the_deviation_of_batch_or_group(scope: str | None, first: Any, second: Any) -> None:
    found = advantages(two_groups(), settings(normalize=scope))
    np.testing.assert_allclose(found, [*first, *second], rtol=1e-12)


def test_episode_advantages_can_be_scaled_by_the_batch() -> None:
    # Returns 2, 1 and 4, 2: advantages 0.5, 0.5, -0.5 and 1, 1, -1 by step: mean 1/4, mean square 5/8, variance 9/16.
    found = advantages(two_groups(), settings("episode", "batch"))
    np.testing.assert_allclose(found, np.array([0.5, 0.5, -0.5, 1.0, 1.0, -1.0]) / 0.75, rtol=1e-12)


@pytest.mark.parametrize("advantage", ["return_to_go", "episode"])
def test_members_that_could_not_be_graded_are_left_out(advantage: str) -> None:
    ungradable = episode_of([100.0], member=2, graded=False)
    empty = Episode([], STOPPED, seed=7, member=3, step_rewards=np.zeros(0))
    members = a_fall_and_a_limit(TERMINATED)
    with_them = advantages([[*members, ungradable, empty]], settings(advantage))
    assert with_them == advantages([members], settings(advantage))
    alone = assign_credit([Group([members[0], ungradable])], settings(advantage))
    assert alone.steps == []
    assert alone.flat == {"ungraded": 1}


def test_what_is_compared_is_what_the_rewards_say_and_not_the_environment() -> None:
    members = a_fall_and_a_limit(TERMINATED)
    members[0].step_rewards, members[1].step_rewards = np.array([0.0, 0.0]), np.array([8.0])
    np.testing.assert_allclose(advantages([members], settings()), [0.0 - 8.0, 0.0, 8.0 - 0.0], rtol=1e-12)


def test_steps_keep_their_order_their_prompts_and_their_replies() -> None:
    groups = [Group(members) for members in two_groups()]
    credit = assign_credit(groups, settings())
    steps = [step for group in groups for episode in group.episodes for step in episode.steps]
    assert [(s.encoded, s.sample) for s in credit.steps] == [(s.encoded, s.sample) for s in steps]


FALLEN, ARRIVED = [1.0, 1.0], [-1.0, -1.0]


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ([(FALLEN, TERMINATED), (FALLEN, TERMINATED)], "all_failed"),
        ([(FALLEN, TRUNCATED), (FALLEN, TRUNCATED)], "all_solved"),
        ([(FALLEN, TRUNCATED), (FALLEN, STOPPED)], "all_solved"),
        ([(ARRIVED, TERMINATED), (ARRIVED, TERMINATED)], "all_solved"),
    ],
)
@pytest.mark.parametrize("advantage", ["return_to_go", "episode"])
def test_a_group_without_a_signal_is_counted_with_its_cause(
    members: list[tuple[list[float], EndReason]], cause: str, advantage: str
) -> None:
    flat = [episode_of(rewards, end, member=m) for m, (rewards, end) in enumerate(members)]
    credit = assign_credit([Group(flat), Group(a_fall_and_a_limit(TERMINATED))], settings(advantage))
    assert credit_metrics(credit) == {"groups/flat": 0.5, f"groups/{cause}": 1}
    assert [step.advantage for step in credit.steps[:4]] == [0.0] * 4


def test_a_fall_at_the_step_of_a_limit_is_told_from_it_by_return_to_go_alone() -> None:
    members = [episode_of(FALLEN), episode_of(FALLEN, TRUNCATED, member=1)]
    assert assign_credit([Group(members)], settings("episode")).flat == {"mixed_ends": 1}
    # 1 + 0.5 * 1 = 1.5 and 1, against 2 and 2.
    np.testing.assert_allclose(advantages([members], settings()), [-0.5, -1.0, 0.5, 1.0], rtol=1e-12)


def test_no_groups_are_no_credit() -> None:
    credit = assign_credit([], settings(normalize="batch"))
    assert (credit.steps, credit.flat_share) == ([], 0.0)


def test_metrics_of_episodes_by_hand() -> None:
    episodes = [
        episode_of([1.0] * 10),
        episode_of([1.0] * 20, EndReason.TRUNCATED),
        episode_of([1.0] * 5, EndReason.STOPPED),
        episode_of([1.0] * 7),
    ]
    for restarted in episodes[2:]:
        restarted.start = "restart"
    episodes[0].scores, episodes[1].scores = {"style": 3.0, "wit": None}, {"style": 4.0, "wit": None}
    assert episode_metrics(episodes) == {
        "episodes": 4,
        "return/mean": 15.0,
        "return/p10": 11.0,
        "return/p90": 19.0,
        "restart/length": 6.0,
        "end/terminated": 2,
        "end/truncated": 1,
        "end/fault": 0,
        "end/stopped": 1,
        "actions/invalid": 0.0,
        "truncation": 0.0,
        "reward/style": 3.5,
    }
    assert episode_metrics([]) == {"episodes": 0} | {f"end/{reason.value}": 0 for reason in EndReason}
