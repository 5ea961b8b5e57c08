"""Pictures of an environment, as fast as they can be had.

Gymnasium's classic-control environments draw on a pygame surface and then spend three quarters of `render()` on turning
the surface into a fresh array. `capture` lets them draw exactly as they do, on a surface that is kept, and reads only the
part that is wanted. All other environments go through `render()`. Both ways give the same pixels.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import AcrobotEnv, CartPoleEnv, MountainCarEnv
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv
from numpy.typing import NDArray
from PIL import Image

from grpo_agents.envs.registry import FrameSettings
from grpo_agents.errors import EnvironmentSetupError
from grpo_agents.rl.episode import Frame

# They draw on `self.surf`, turn it over and copy it to `self.screen`.
_DRAWN_UPSIDE_DOWN = (CartPoleEnv, MountainCarEnv, Continuous_MountainCarEnv, AcrobotEnv)
_NOTHING = np.zeros((1, 1, 3), dtype=np.uint8)


class Capture:
    """Takes frames of one environment.

    Args:
        env: an environment made with `render_mode="rgb_array"`.
        settings: crop, size and inversion.
    """

    def __init__(self, env: gym.Env[Any, Any], settings: FrameSettings):
        self.env = env
        self.settings = settings
        self._surface: Any = None
        self._canvas = isinstance(env.unwrapped, _DRAWN_UPSIDE_DOWN)

    def frame(self) -> Frame:
        """The environment as it looks now, after the one and only resize.

        Raises:
            EnvironmentSetupError: the environment renders nothing.
        """
        if self._canvas:
            return Frame(self._finish(self._draw(), as_drawn=True))
        rendered = self.env.render()
        if not isinstance(rendered, np.ndarray) or rendered.ndim != 3:
            spec = self.env.spec
            raise EnvironmentSetupError(
                f"{spec.id if spec else self.env} renders {type(rendered).__name__}, not a picture. It needs "
                'render_mode="rgb_array" and a render() that returns uint8 of shape (height, width, 3)'
            )
        return Frame(
            self._finish(Image.fromarray(np.ascontiguousarray(rendered[..., :3]).astype(np.uint8, copy=False)))
        )

    def picture(self) -> NDArray[np.uint8]:
        """What `render()` returns: the whole picture at full size."""
        screen = getattr(self.env.unwrapped, "screen", None) if self._canvas else None
        if screen is not None:
            screen.set_clip(None)
        rendered = np.array(self.env.render(), dtype=np.uint8)
        if screen is not None:
            screen.set_clip((0, 0, 0, 0))
        return rendered

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
            self._surface = make(env.screen.get_size())
            env.screen.set_clip((0, 0, 0, 0))  # the copy to the screen is not looked at
        pygame.Surface = lambda *_: self._surface
        pygame.transform.flip = lambda surface, *_: surface
        pygame.surfarray.pixels3d = lambda _: _NOTHING
        try:
            env.render()
        finally:
            pygame.Surface, pygame.transform.flip, pygame.surfarray.pixels3d = make, turn, read
        memory = np.frombuffer(self._surface.get_view("0"), dtype=np.uint8)
        return Image.frombuffer("RGBX", self._surface.get_size(), memory, "raw", "RGBX", 0, 1)

    def _finish(self, picture: Image.Image, as_drawn: bool = False) -> NDArray[np.uint8]:
        width, height = picture.size
        left, top, right, bottom = self.settings.crop or (0, 0, width, height)
        if right > width or bottom > height:
            raise EnvironmentSetupError(
                f"env.frames.crop={left},{top},{right},{bottom} reaches outside the rendered {width}x{height} pixels"
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


def _whole_blocks(box: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[int, int] | None:
    """Rendered pixels across and down for each pixel of the frame, where these are whole numbers."""
    (across, more_across), (down, more_down) = divmod(box[2] - box[0], size[0]), divmod(box[3] - box[1], size[1])
    return None if more_across or more_down or not across or not down else (across, down)
