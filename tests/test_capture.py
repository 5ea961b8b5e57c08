"""The fast way to a frame gives the pixels of `render()`, and leaves pygame as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pygame
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from numpy.typing import NDArray
from PIL import Image

from grpo_agents.envs.capture import Capture
from grpo_agents.envs.registry import FrameSettings
from grpo_agents.errors import EnvironmentSetupError

FAST = ("CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1")
CLASSIC = (*FAST, "Pendulum-v1")
# 10 and 8 rendered pixels for one.
BLOCKS = FrameSettings(crop=(20, 40, 460, 360), size=(44, 40))
FRACTIONAL = FrameSettings(crop=(13, 31, 488, 350), size=(57, 48))
ENLARGED = FrameSettings(crop=(200, 100, 240, 120), size=(100, 64))


@pytest.fixture(scope="module", params=CLASSIC)
def env(request: pytest.FixtureRequest) -> Iterator[gym.Env[Any, Any]]:
    env = gym.make(request.param, render_mode="rgb_array")
    env.reset(seed=0)
    yield env
    env.close()


def put_into_random_state(env: gym.Env[Any, Any], rng: np.random.Generator) -> None:
    """Anywhere in the space of states, where some are half outside the picture."""
    inner: Any = env.unwrapped
    ranges = {
        "CartPole-v1": [(-3, 3), (0, 0), (-1.5, 1.5), (0, 0)],
        "MountainCar-v0": [(-1.2, 0.6), (0, 0)],
        "MountainCarContinuous-v0": [(-1.2, 0.6), (0, 0)],
        "Acrobot-v1": [(-np.pi, np.pi), (-np.pi, np.pi), (0, 0), (0, 0)],
        "Pendulum-v1": [(-np.pi, np.pi), (0, 0)],
    }[str(inner.spec.id)]
    inner.state = np.array([rng.uniform(*limits) for limits in ranges])
    if hasattr(inner, "last_u"):
        inner.last_u = rng.uniform(-2, 2)


def resized(picture: NDArray[np.uint8], settings: FrameSettings, kind: Image.Resampling) -> NDArray[np.uint8]:
    assert settings.size
    return np.asarray(Image.fromarray(picture).crop(settings.crop).resize(settings.size, kind))


def test_the_fast_way_is_taken_for_what_draws_on_a_surface(env: gym.Env[Any, Any]) -> None:
    assert env.spec
    assert Capture(env, FrameSettings()).fast == (env.spec.id in FAST)


@pytest.mark.parametrize(("invert", "states"), [(False, 50), (True, 3)])
def test_random_states_look_as_rendered(env: gym.Env[Any, Any], invert: bool, states: int) -> None:
    kinds = (FrameSettings(), BLOCKS, FRACTIONAL, ENLARGED)
    captures = [Capture(env, replace(settings, invert=invert)) for settings in kinds]
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(states):
        put_into_random_state(env, rng)
        frames = [capture.frame().pixels for capture in captures]
        picture = np.array(env.render())
        expected = [
            picture,
            np.asarray(Image.fromarray(picture).reduce((10, 8), box=BLOCKS.crop)),
            resized(picture, FRACTIONAL, Image.Resampling.BOX),
            resized(picture, ENLARGED, Image.Resampling.BICUBIC),
        ]
        for frame, pixels in zip(frames, expected, strict=True):
            np.testing.assert_array_equal(frame, 255 - pixels if invert else pixels)
        np.testing.assert_array_equal(captures[0].picture(), picture)
        seen.add(frames[0].tobytes())
    assert len(seen) == states


def test_the_picture_for_people_is_new_each_time(env: gym.Env[Any, Any]) -> None:
    capture = Capture(env, FrameSettings())
    rng = np.random.default_rng(1)
    put_into_random_state(env, rng)
    first = capture.picture()
    before = first.copy()
    put_into_random_state(env, rng)
    capture.frame()
    assert (capture.picture() != first).any()
    np.testing.assert_array_equal(first, before)


def test_a_frame_does_not_change_when_the_environment_goes_on(env: gym.Env[Any, Any]) -> None:
    for settings in (FrameSettings(), BLOCKS, FRACTIONAL):
        capture = Capture(env, settings)
        frame = capture.frame()
        before = frame.pixels.copy()
        put_into_random_state(env, np.random.default_rng(2))
        capture.frame()
        np.testing.assert_array_equal(frame.pixels, before)


@pytest.mark.parametrize(
    "crop", [(0, 0, 601, 400), (0, 0, 600, 401), (300, 0, 300, 400), (0, 300, 600, 200), (-1, 0, 600, 400)]
)
def test_a_crop_that_is_no_part_of_the_picture_is_refused(crop: tuple[int, int, int, int]) -> None:
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=0)
    values = ",".join(map(str, crop))
    with pytest.raises(
        EnvironmentSetupError, match=rf"crop={values} is no part of the 600x400 pixels that CartPole-v1"
    ):
        Capture(env, FrameSettings(crop=crop)).frame()


def test_pygame_is_as_before_even_where_drawing_raises() -> None:
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=0)
    capture = Capture(env, FrameSettings())
    before = pygame.Surface, pygame.transform.flip, pygame.surfarray.pixels3d
    capture.frame()
    assert (pygame.Surface, pygame.transform.flip, pygame.surfarray.pixels3d) == before
    inner: Any = env.unwrapped
    state, inner.state = inner.state, "no state"
    with pytest.raises(TypeError):
        capture.frame()
    assert (pygame.Surface, pygame.transform.flip, pygame.surfarray.pixels3d) == before
    inner.state = state
    np.testing.assert_array_equal(env.render(), capture.frame().pixels)


def test_closing_one_environment_leaves_the_others_drawable() -> None:
    envs = [gym.make("CartPole-v1", render_mode="rgb_array") for _ in range(2)]
    captures = [Capture(env, FrameSettings()) for env in envs]
    for env, capture in zip(envs, captures, strict=True):
        env.reset(seed=0)
        capture.frame()
    envs[0].close()
    envs[1].step(0)
    np.testing.assert_array_equal(captures[1].frame().pixels, envs[1].render())


class Tinted(gym.Wrapper[Any, Any, Any, Any]):
    def render(self) -> Any:
        return np.array(self.env.render()) // 2


class Marked(CartPoleEnv):
    def render(self) -> Any:
        picture = np.array(super().render())
        picture[:9] = (255, 0, 0)
        return picture


@pytest.mark.parametrize(
    "env", [Tinted(gym.make("CartPole-v1", render_mode="rgb_array")), Marked(render_mode="rgb_array")], ids=type
)
def test_an_environment_that_renders_in_its_own_way_is_seen_so(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    capture = Capture(env, FrameSettings(crop=(0, 0, 600, 200)))
    assert not capture.fast
    np.testing.assert_array_equal(capture.frame().pixels, np.array(env.render())[:200])
