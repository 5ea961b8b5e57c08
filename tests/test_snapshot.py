"""A restored environment plays on exactly as the saved one did, and one that does not is refused."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from worlds import WORDS, Track, track

from grpo_agents.envs.prompt_env import PromptEnv
from grpo_agents.envs.registry import FrameSettings, PromptSettings
from grpo_agents.envs.snapshot import restore, save, verify
from grpo_agents.errors import SnapshotError

CLASSIC = ("CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1")
Env = gym.Env[Any, Any]


class Tally(gym.Wrapper[Any, Any, Any, Any]):
    """Rewards depend on all that was done since the reset."""

    def __init__(self, env: Env):
        super().__init__(env)
        self.counts = {"steps": np.zeros(2)}
        self.last: deque[float] = deque(maxlen=3)

    def reset(self, **kwargs: Any) -> Any:
        self.counts["steps"][:] = 0
        self.last.clear()
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        observation, _, *rest = self.env.step(action)
        self.counts["steps"] += (1, 10)
        self.last.append(float(np.sum(observation)))
        return observation, float(self.counts["steps"].sum() + sum(self.last)), *rest


def classic(name: str) -> Env:
    return gym.make(name, render_mode="rgb_array", max_episode_steps=12)


MAKE: dict[str, Callable[[], Env]] = {name: lambda name=name: classic(name) for name in CLASSIC} | {  # type: ignore[misc]
    "custom": lambda: TimeLimit(Track("rgb_array"), 12),
    "wrapped": lambda: Tally(FrameStackObservation(Tally(classic("CartPole-v1")), 4)),
}


def played(env: Env, actions: list[Any]) -> list[Any]:
    """All that can be seen of an episode: observations, rewards, ends, pictures, and the generator's next number."""
    seen: list[Any] = []
    for action in actions:
        seen.append((*env.step(action)[:4], np.array(env.render())))
        if seen[-1][2] or seen[-1][3]:
            break
    return [*seen, env.unwrapped.np_random.random()]


def five_steps(make: Callable[[], Env]) -> tuple[Env, list[Any]]:
    """An environment in the middle of an episode of 12 steps, and ten more actions."""
    env = make()
    env.action_space.seed(3)
    env.reset(seed=5)
    for _ in range(5):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        assert not terminated and not truncated
    return env, [env.action_space.sample() for _ in range(10)]


@pytest.mark.parametrize("name", MAKE)
def test_the_saved_and_another_instance_play_on_identically_as_often_as_wanted(name: str) -> None:
    env, actions = five_steps(MAKE[name])
    other = MAKE[name]()
    other.reset(seed=6)
    snapshot = pickle.loads(pickle.dumps(save(env)))  # as a checkpoint keeps it
    expected = played(env, actions)
    # The step limit of 12 is met after exactly 7 more steps, if nothing else ends the episode.
    assert expected[-2][2] or (len(expected) == 8 and expected[-2][3])
    for again in (other, env, other):
        restore(again, snapshot)
        assert data_equivalence(played(again, actions), expected, exact=True)


def test_what_belongs_together_in_an_environment_still_does_after_restoring() -> None:
    env, _ = five_steps(MAKE["custom"])
    other = MAKE["custom"]()
    other.reset(seed=6)
    restore(other, save(env))
    inner: Any = other.unwrapped
    assert inner.things[0] is inner.ball
    assert inner.dice is inner.np_random
    assert [push.__self__ for push in inner.pushes] == [inner, inner]
    assert inner.ball is not env.unwrapped.ball  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["images", "video"])
def test_the_window_of_frames_is_restored(kind: Any) -> None:
    def make() -> PromptEnv[Any]:
        return track(frames=FrameSettings(history=3, stride=2, kind=kind))

    def frames(prompt: Any) -> list[bytes]:
        return [f.digest for v in prompt.visuals() for f in (v.frames if kind == "video" else (v.frame,))]

    env, actions = five_steps(make)
    other = make()
    other.reset(seed=6)
    saved = save(env)
    now = frames(env.prompt())  # type: ignore[attr-defined]
    expected = [frames(env.step(action)[0]) for action in actions[:3]]
    restore(other, saved)
    assert frames(other.prompt()) == now
    assert len(set(now)) == 3
    assert [frames(other.step(action)[0]) for action in actions[:3]] == expected


def test_an_environment_that_is_wrapped_differently_is_refused() -> None:
    bare, limited = Track(), TimeLimit(Track(), 12)
    for env in (bare, limited):
        env.reset(seed=0)
    with pytest.raises(SnapshotError, match="has the wrapper TimeLimit where this one has Track"):
        restore(bare, save(limited))
    with pytest.raises(SnapshotError, match="one more wrapper than the saved one: TimeLimit"):
        restore(limited, save(bare))


@pytest.mark.parametrize("name", [*CLASSIC, "custom", "wrapped"])
def test_exact_environments_pass_the_proof(name: str) -> None:
    verify(MAKE[name])
    verify(MAKE[name], seed=8, steps=40)


def test_prompts_pass_the_proof() -> None:
    verify(track)


_WEATHER = {"steps": 0, "wind": 0}


class Weathered(Track):
    """The weather outside the object goes on with every step of any instance."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        _WEATHER["steps"] += 1
        return observation, reward + _WEATHER["steps"], *rest


class Prevailing(Track):
    """The weather outside the object is made by a reset, and then stays."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        _WEATHER["wind"] = int(self.np_random.integers(-100, 100))
        return result

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward + _WEATHER["wind"], *rest


class Repainted(Track):
    """What is outside the object shows in the picture alone."""

    def render(self) -> Any:
        _WEATHER["steps"] += 1
        return np.full((16, 32, 3), _WEATHER["steps"] % 256, np.uint8)


@pytest.mark.parametrize("kind", [Weathered, Prevailing])
def test_state_outside_the_environment_is_found_out(kind: type[Track]) -> None:
    with pytest.raises(SnapshotError, match=rf"{kind.__name__} does not play on .* outside the .* object.*start=reset"):
        verify(lambda: kind("rgb_array"))


@pytest.mark.parametrize("frames", ["images", "video"])
def test_a_difference_in_the_pictures_alone_is_found_out(frames: Any) -> None:
    settings = PromptSettings(actions=WORDS, frames=FrameSettings(kind=frames))
    with pytest.raises(SnapshotError, match="does not play on identically"):
        verify(lambda: PromptEnv(Repainted("rgb_array"), settings))


class Logged(Track):
    """Holds an open handle, of which there is no copy."""

    def __init__(self) -> None:
        super().__init__("rgb_array")
        self.log = io.TextIOWrapper(io.BytesIO())


class LoggedTally(Tally):
    def __init__(self, env: Env):
        super().__init__(env)
        self.counts["log"] = io.TextIOWrapper(io.BytesIO())  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "name"),
    [(Logged, "Logged"), (lambda: LoggedTally(Track()), "LoggedTally")],
    ids=["inside", "in a wrapper"],
)
def test_an_open_handle_is_refused_by_name(make: Callable[[], Env], name: str) -> None:
    with pytest.raises(SnapshotError, match=rf"^{name} cannot be saved: .*TextIOWrapper.*Use group.start=reset"):
        verify(make)


def test_the_proof_closes_what_it_made() -> None:
    made: list[Track] = []

    def make() -> Track:
        made.append(Weathered())
        return made[-1]

    with pytest.raises(SnapshotError):
        verify(make)
    assert [env.closed for env in made] == [True, True]
