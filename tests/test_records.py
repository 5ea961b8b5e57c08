"""Each contradiction in the records of an update is found, and its place is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds import LAYOUT, SIZES, episode_of

from grpo_agents.errors import RecordError
from grpo_agents.rl.episode import Encoded, EndReason, Frame, Group, VisualSpan
from grpo_agents.rl.record_check import check_groups


def groups() -> list[Group]:
    """Two groups of two members of three steps."""
    return [Group([episode_of([1.0] * 3, member=member) for member in range(2)]) for _ in range(2)]


def check(played: list[Group]) -> None:
    check_groups(played, **SIZES, version=0)


def with_step(**changes: Any) -> list[Group]:
    """The last step of the last member is changed, its reply by the keys that start with sample_, its prompt by those that
    start with encoded_."""
    played = groups()
    steps = played[1].episodes[1].steps
    step = steps[2]
    for part in ("sample", "encoded"):
        own = {key.removeprefix(f"{part}_"): changes.pop(key) for key in list(changes) if key.startswith(part)}
        step = replace(step, **{part: replace(getattr(step, part), **own)})
    steps[2] = replace(step, **changes)
    return played


def test_sound_records_pass() -> None:
    check(groups())
    check([])
    check(with_step(terminated=False, truncated=True))
    check(with_step(sample_allowed=None, sample_choice=None, sample_choice_probs=None))


VIDEO = (Frame(np.zeros((16, 32, 3), np.uint8)),) * 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"encoded_visuals": (VIDEO, VIDEO)}, "its prompt has 2 placeholder tokens for pictures that have 4"),
        ({"encoded_visuals": (VIDEO * 2,)}, "its prompt has 2 placeholder tokens for pictures that have 4"),
        ({"encoded_visuals": ()}, "its prompt has 2 placeholder tokens for pictures that have 0"),
        (
            {"encoded_layout": replace(LAYOUT, spans=(VisualSpan(2, 3, (1, 2, 6)),))},
            "its prompt has 3 placeholder tokens for pictures that have 2",
        ),
        (
            {"encoded_layout": replace(LAYOUT, ids=np.arange(7))},
            r"its 7 prompt tokens have positions of shape \(3, 6\)",
        ),
        ({"sample_ids": np.array([], np.int64)}, "its reply has no token"),
        ({"sample_ids": np.array([10, 11])}, "its reply has 2 tokens and 1 log-probabilities"),
        ({"sample_logprobs": np.array([np.nan], np.float32)}, r"its reply has the log-probabilities \[nan\]"),
        ({"sample_logprobs": np.array([-np.inf], np.float32)}, r"its reply has the log-probabilities \[-inf\]"),
        ({"sample_allowed": ((10, 11), (10,))}, "its reply has 1 tokens and 2 sets of allowed tokens"),
        ({"sample_allowed": ((11, 12),)}, "token 10 of its reply is not among those it was chosen from"),
        (
            {"sample_policy_version": 4},
            "it was sampled with the weights of update 4, and the learner holds 0",
        ),
        ({"reward": float("nan")}, "its reward is nan"),
        ({"reward": float("inf")}, "its reward is inf"),
    ],
)
def test_a_contradiction_in_a_step_is_named_with_its_place(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecordError, match=rf"^group 1, member 1, step 2 \(seed 7\): {problem}$"):
        check(with_step(**changes))


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_an_episode_does_not_go_on_after_its_end(end: str) -> None:
    played = groups()
    steps = played[0].episodes[1].steps
    steps[0] = replace(steps[0], terminated=end == "terminated", truncated=end == "truncated")
    with pytest.raises(
        RecordError, match=r"^group 0, member 1, step 0 .*: it ended the episode, which goes on for 2 more"
    ):
        check(played)


def test_members_of_a_group_have_one_start() -> None:
    played = groups()
    other = played[1].episodes[1]
    encoded = Encoded(LAYOUT, ((Frame(np.ones((16, 32, 3), np.uint8)),) * 2,), 10.0)
    other.steps[0] = replace(other.steps[0], encoded=encoded, observation_hash=encoded.observation_hash)
    with pytest.raises(
        RecordError, match=r"^group 1, member 1, step 0 \(seed 7\): it saw another start than member 0$"
    ):
        check(played)
    with pytest.raises(RecordError, match=r"^the 2 members of a group do not share their start: seed 7 led to 2"):
        Group(played[1].episodes)


def test_equal_prompts_and_only_those_have_equal_hashes() -> None:
    black = Encoded(LAYOUT, (VIDEO,), 10.0)
    same = Encoded(replace(LAYOUT), ((Frame(np.zeros((16, 32, 3), np.uint8)),) * 2,), 10.0)
    assert black.observation_hash == same.observation_hash
    one_pixel = np.zeros((16, 32, 3), np.uint8)
    one_pixel[3, 4, 0] = 1
    others = [
        Encoded(LAYOUT, ((VIDEO[0], Frame(one_pixel)),), 10.0),
        Encoded(LAYOUT, ((Frame(one_pixel), VIDEO[0]),), 10.0),
        Encoded(LAYOUT, ((Frame(np.zeros((32, 16, 3), np.uint8)),) * 2,), 10.0),
        Encoded(replace(LAYOUT, ids=LAYOUT.ids + 1), (VIDEO,), 10.0),
    ]
    assert len({each.observation_hash for each in [black, *others]}) == 5


def test_a_stopped_episode_has_no_ending_step() -> None:
    played = [Group([episode_of([1.0] * 3, EndReason.STOPPED, member=member) for member in range(2)])]
    assert not played[0].episodes[0].steps[-1].terminated
    check(played)
