"""Small environments, prompts of few tokens, and replies that no model draws.

Importing this module registers `Track-v0`, as a user's own module would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from grpo_agents.envs.prompt_env import PromptEnv
from grpo_agents.envs.registry import FrameSettings, PromptSettings
from grpo_agents.rl.episode import (
    Encoded,
    EndReason,
    Episode,
    Frame,
    Layout,
    Prompt,
    Sample,
    Step,
    VideoPart,
    VisualSpan,
)

WORDS = ("left", "right")
TOKENS = (10, 11)
"""The token of each word."""
SIZES = {"patch": 8, "temporal": 2, "merge": 2}
"""Of the vision tower that the prompts are meant for."""


class Track(gym.Env[NDArray[np.int64], np.int64]):
    """A ball on a track in the wind, which rolls off at either end.

    ## Action Space
    `Discrete(2)`, from `first_action` on: push left, push right. The wind pushes by -1, 0 or 1 places more.

    ## Observation Space
    The place of the ball.

    ## Rewards
    1 for each step.

    ## Starting State
    One of the three places in the middle.

    ## Episode End
    Terminated when the ball leaves the track.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as Gymnasium has it)
    length = 9

    def __init__(self, render_mode: str | None = None, first_action: int = 0):
        self.render_mode = render_mode
        self.first_action = first_action
        self.action_space = spaces.Discrete(2, start=first_action)
        self.observation_space = spaces.Box(-2, self.length + 1, (1,), np.int64)
        self.closed = False
        # Parts that share state and know of each other, which a copy has to keep so.
        self.ball = [0]
        self.things = [self.ball]
        self.pushes: tuple[Callable[[], None], ...] = (self._push_left, self._push_right)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        super().reset(seed=seed)
        self.dice = self.np_random
        self.ball[0] = int(self.np_random.integers(self.length // 2 - 1, self.length // 2 + 2))
        return self._place(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, dict[str, Any]]:
        self.pushes[int(action) - self.first_action]()
        self.things[0][0] += int(self.dice.integers(-1, 2))
        return self._place(), 1.0, not 0 <= self.ball[0] < self.length, False, {}

    def render(self) -> NDArray[np.uint8]:  # type: ignore[override]
        picture = np.full((16, 32, 3), 255, dtype=np.uint8)
        picture[:, 2 * self.ball[0] + 1 : 2 * self.ball[0] + 3] = (0, 100, 200)
        return picture

    def close(self) -> None:
        self.closed = True

    def _place(self) -> NDArray[np.int64]:
        return np.array(self.ball)

    def _push_left(self) -> None:
        self.ball[0] -= 1

    def _push_right(self) -> None:
        self.ball[0] += 1


gym.register("Track-v0", "worlds:Track", max_episode_steps=20)


def track(
    *, steps: int = 20, frames: FrameSettings | None = None, world: type[Track] = Track, first_action: int = 0
) -> PromptEnv[Any]:
    """A `Track`, or another `world` like it, put to a policy."""
    env = gym.wrappers.TimeLimit(world("rgb_array", first_action), steps)
    return PromptEnv(env, PromptSettings("Keep the ball on the track.", WORDS, frames=frames or FrameSettings()))


LAYOUT = Layout(
    ids=np.arange(6), position_ids=np.tile(np.arange(6), (3, 1)), spans=(VisualSpan(2, 2, (1, 2, 4)),), prefix=2
)
"""Two tokens of text, two for a video of one temporal patch of 32x16 pixels, two of text."""


def encode(prompt: Prompt) -> Encoded:
    """Any prompt with one video of two frames of 32x16 pixels."""
    (video,) = prompt.visuals()
    assert isinstance(video, VideoPart)
    return Encoded(LAYOUT, (video.frames,), video.fps)


def reply(choice: int, *, version: int = 0) -> Sample:
    """One of two words, which were equally likely."""
    return Sample(
        ids=np.array([TOKENS[choice]]),
        logprobs=np.log(np.array([0.5], dtype=np.float32)),
        allowed=(TOKENS,),
        choice=choice,
        choice_probs=np.array([0.5, 0.5], dtype=np.float32),
        policy_version=version,
        temperature=1.0,
        greedy=False,
        finish="action",
    )


def coin(rng: np.random.Generator | None) -> Sample:
    """A reply by the episode's own stream; without one the likeliest, which is the first."""
    return reply(0 if rng is None else int(rng.integers(2)))


class Shuffled:
    """A sampler that answers one request at a time, in an order of its own.

    Args:
        seed: of the order; None answers the oldest request first.
        answer: makes the reply, or raises.
    """

    def __init__(self, seed: int | None, answer: Callable[[np.random.Generator | None], Sample] = coin):
        self.answer = answer
        self._order = None if seed is None else np.random.default_rng(seed)
        self._waiting: list[tuple[asyncio.Future[Sample], np.random.Generator | None]] = []
        self.answered: list[int] = []
        """The requests' numbers in the order of their answers."""
        self._numbers: dict[asyncio.Future[Sample], int] = {}

    async def draw(self, encoded: Encoded, rng: np.random.Generator | None) -> Sample:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sample] = loop.create_future()
        self._numbers[future] = len(self._numbers)
        self._waiting.append((future, rng))
        loop.call_soon(self._answer_one)
        return await future

    def _answer_one(self) -> None:
        which = 0 if self._order is None else int(self._order.integers(len(self._waiting)))
        future, rng = self._waiting.pop(which)
        self.answered.append(self._numbers[future])
        try:
            future.set_result(self.answer(rng))
        except Exception as error:
            future.set_exception(error)


def episode_of(
    rewards: Sequence[float], end: EndReason = EndReason.TERMINATED, *, member: int = 0, graded: bool = True
) -> Episode:
    """An episode of nothing but rewards, graded by them."""
    prompt = Encoded(LAYOUT, ((Frame(np.zeros((16, 32, 3), np.uint8)),) * 2,), fps=10.0)
    steps = [
        Step(
            encoded=prompt,
            sample=reply(0),
            action=0,
            valid=True,
            reward=float(reward),
            terminated=end is EndReason.TERMINATED and t == len(rewards) - 1,
            truncated=end is EndReason.TRUNCATED and t == len(rewards) - 1,
            observation_hash=prompt.observation_hash,
        )
        for t, reward in enumerate(rewards)
    ]
    episode = Episode(steps, end, seed=7, member=member)
    if graded:
        episode.step_rewards = episode.rewards
    return episode
