"""Which states restarts begin from: those shortly before an episode ended badly."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import episode_of

from grpo_agents.rl.episode import EndReason, Episode
from grpo_agents.rl.rollout import collect_restarts
from grpo_agents.rl.starts import RestartPool, Trail, ended_badly


def test_a_trail_reaches_as_far_back_as_was_asked() -> None:
    rng = np.random.default_rng(0)
    for end in range(1, 120):
        trail = Trail(40)
        for step in range(0, end, 5):  # as they are saved while an episode of `end` steps is played
            trail.add(step, step)
        found = {trail.before(end, 15, 40, rng) for _ in range(100)}
        fitting: set[int | None] = {step for step in range(0, end, 5) if 15 <= end - step <= 40}
        assert found == (fitting or {None})


@pytest.mark.parametrize(
    ("what", "rewards", "end", "badly"),
    [
        ("the pole falls", [1.0] * 30, EndReason.TERMINATED, True),
        ("the pole falls at once", [1.0], EndReason.TERMINATED, True),
        ("the pole stands at the limit", [1.0] * 30, EndReason.TRUNCATED, False),
        ("a restart reaches its horizon", [1.0] * 30, EndReason.STOPPED, False),
        ("the environment breaks", [1.0] * 30, EndReason.FAULT, False),
        ("the car is on top", [-1.0] * 30, EndReason.TERMINATED, False),
        ("the car is still below at the limit", [-1.0] * 30, EndReason.TRUNCATED, False),
        ("the arm is up", [-1.0] * 30 + [0.0], EndReason.TERMINATED, False),
        ("a goal that alone is rewarded", [0.0] * 30 + [1.0], EndReason.TERMINATED, False),
        ("a hole", [0.0] * 30, EndReason.TERMINATED, True),
        ("a crash", [0.5] * 30 + [-100.0], EndReason.TERMINATED, True),
        ("a soft landing", [0.5] * 30 + [100.0], EndReason.TERMINATED, False),
    ],
)
def test_an_ending_is_bad_where_going_on_was_worth_as_much(
    what: str, rewards: list[float], end: EndReason, badly: bool
) -> None:
    assert ended_badly(episode_of(rewards, end)) is badly


def test_only_states_before_bad_endings_are_kept() -> None:
    def played(reward: float, end: EndReason, name: str) -> tuple[Episode, Trail]:
        trail = Trail(40)
        for step in range(0, 30, 5):
            trail.add(step, f"{name} {step}")
        return episode_of([reward] * 30, end), trail

    pool = RestartPool(10)
    members = [
        played(1.0, EndReason.TERMINATED, "fallen"),
        played(1.0, EndReason.TRUNCATED, "standing"),
        played(-1.0, EndReason.TERMINATED, "arrived"),
        played(1.0, EndReason.STOPPED, "stopped"),
        (episode_of([1.0] * 30), None),
        (episode_of([1.0] * 3), Trail(40)),
    ]
    collect_restarts([members[:3], members[3:]], pool, (6, 10), np.random.default_rng(0))
    assert pool.state() == [(7, "fallen 20")]


def test_a_pool_keeps_the_newest_states_and_draws_each() -> None:
    pool = RestartPool(3)
    for seed in range(5):
        pool.add(seed, f"state {seed}")
    other = RestartPool(3)
    other.load_state(pool.state())
    for each in (pool, other):
        rng = np.random.default_rng(0)
        starts = [each.draw(rng, 25) for _ in range(50)]
        assert {(s.seed, s.snapshot, s.horizon, s.kind) for s in starts} == {
            (seed, f"state {seed}", 25, "restart") for seed in (2, 3, 4)
        }
