"""Pictures of an environment, as fast as they can be had.

Gymnasium's classic-control environments draw on a pygame surface and then spend three quarters of `render()` on turning
the surface into a fresh array. `capture` lets them draw exactly as they do, on a surface that is kept, and reads only the
part that is wanted. All other environments, and those in wrappers with a `render()` of their own, go through `render()`.
Both ways give the same pixels.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import AcrobotEnv, CartPoleEnv, MountainCarEnv
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from numpy.typing import NDArray
from PIL import Image

from grpo_agents.envs.registry import FrameSettings
from grpo_agents.errors import EnvironmentSetupError
from grpo_agents.rl.episode import Frame

# They draw on a new surface, turn it over and copy it to `self.screen`. A subclass may draw in another way.
_DRAWN_UPSIDE_DOWN = (CartPoleEnv, MountainCarEnv, Continuous_MountainCarEnv, AcrobotEnv)
_PASSED_THROUGH = (gym.Wrapper.render, OrderEnforcing.render, PassiveEnvChecker.render)
_NOTHING = np.zeros((1, 1, 3), dtype=np.uint8)


class Capture:
    """Takes frames of one environment.

    Args:
        env: an environment made with `render_mode="rgb_array"`.
        settings: crop, size and inversion.

    Attributes:
        fast: whether drawing is watched instead of calling `render()`.
    """

    def __init__(self, env: gym.Env[Any, Any], settings: FrameSettings):
        self.env = env
        self.settings = settings
        self._surface: Any = None
        self.fast = _draws_on_a_surface(env)

    def frame(self) -> Frame:
        """The environment as it looks now, after the one and only resize.

        Raises:
            EnvironmentSetupError: the environment renders nothing.
        """
        if self.fast:
            return Frame(self._finish(self._draw(), as_drawn=True))
        return Frame(self._finish(Image.fromarray(np.ascontiguousarray(self.picture()))))

    def picture(self) -> NDArray[np.uint8]:
        """What `render()` returns: the whole picture at full size, uint8 (height, width, 3).

        Raises:
            EnvironmentSetupError: that is something else.
        """
        rendered: Any = self.env.render()
        if (
            isinstance(rendered, np.ndarray)
            and rendered.dtype == np.uint8
            and rendered.ndim == 3
            and rendered.shape[2] == 3
        ):
            return rendered
        what = type(rendered).__name__
        if isinstance(rendered, np.ndarray):
            what = f"{rendered.dtype} of shape {rendered.shape}"
        raise EnvironmentSetupError(
            f"render() of {self._name} returned {what}, not a picture. Policies see what it returns in the mode rgb_array: "
            "make it uint8 of shape (height, width, 3), from the first reset on"
        )

    @property
    def _name(self) -> str:
        return self.env.spec.id if self.env.spec else type(self.env.unwrapped).__name__

    def _draw(self) -> Image.Image:
        """Let the environment draw on a kept surface, and look at the surface's memory instead of copying it.

        The picture is as drawn: upside down, and in pygame's byte order blue, green, red, unused.
        """
        pygame: Any = importlib.import_module("pygame")
        env: Any = self.env.unwrapped
        make, turn, read = pygame.Surface, pygame.transform.flip, pygame.surfarray.pixels3d
        if env.screen is None:
            env.render()  # creates the screen, in the environment's own size
        if self._surface is None:
            self._surface = make(env.screen.get_size(), 0, 32)
        env.screen.set_clip((0, 0, 0, 0))  # the copy to the screen is not looked at
        pygame.Surface = lambda *_: self._surface
        pygame.transform.flip = lambda surface, *_: surface
        pygame.surfarray.pixels3d = lambda _: _NOTHING
        try:
            env.render()
        finally:
            pygame.Surface, pygame.transform.flip, pygame.surfarray.pixels3d = make, turn, read
            env.screen.set_clip(None)
        memory = np.frombuffer(self._surface.get_view("0"), dtype=np.uint8)
        return Image.frombuffer("RGBX", self._surface.get_size(), memory, "raw", "RGBX", 0, 1)

    def _finish(self, picture: Image.Image, as_drawn: bool = False) -> NDArray[np.uint8]:
        width, height = picture.size
        left, top, right, bottom = self.settings.crop or (0, 0, width, height)
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise EnvironmentSetupError(
                f"env.frames.crop={left},{top},{right},{bottom} is no part of the {width}x{height} pixels that {self._name} "
                f"renders; left,top,right,bottom have to lie in 0,0,{width},{height}"
            )
        size = self.settings.size or (right - left, bottom - top)
        blocks = _whole_blocks((left, top, right, bottom), size)
        if as_drawn:
            top, bottom = height - bottom, height - top
        if blocks is not None:
            # Means of whole blocks are the same in either direction, so the small picture is turned over.
            pixels = np.asarray(picture.reduce(blocks, box=(left, top, right, bottom)))
            pixels = pixels[::-1, :, 2::-1] if as_drawn else pixels[..., :3]
        else:
            part = picture.crop((left, top, right, bottom))
            if as_drawn:
                part = part.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
            shrinks = size[0] < part.width and size[1] < part.height
            pixels = np.asarray(part.resize(size, Image.Resampling.BOX if shrinks else Image.Resampling.BICUBIC))
            pixels = pixels[..., 2::-1] if as_drawn else pixels[..., :3]
        if self.settings.invert:
            pixels = 255 - pixels
        return np.ascontiguousarray(pixels)


def _draws_on_a_surface(env: gym.Env[Any, Any]) -> bool:
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if type(layer).render not in _PASSED_THROUGH:
            return False
        layer = layer.env
    return type(layer) in _DRAWN_UPSIDE_DOWN


def _whole_blocks(box: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[int, int] | None:
    """Rendered pixels across and down for each pixel of the frame, where these are whole numbers."""
    (across, more_across), (down, more_down) = divmod(box[2] - box[0], size[0]), divmod(box[3] - box[1], size[1])
    return None if more_across or more_down or not across or not down else (across, down)
