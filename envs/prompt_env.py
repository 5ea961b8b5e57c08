"""The wrapper that puts an environment to a vision-language policy: frames in, action words out."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Sequence
from typing import Any, SupportsFloat, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.core import WrapperObsType

from grpo_agents.config import EnvConfig
from grpo_agents.envs.capture import Capture
from grpo_agents.envs.registry import FrameSettings, PromptSettings, prompt_settings
from grpo_agents.errors import EnvironmentSetupError
from grpo_agents.rl.episode import Frame, ImagePart, Message, Part, Prompt, TextPart, VideoPart


class PromptSpace(spaces.Space[Prompt]):
    """All prompts of one environment: its text, with any pixels of the right size."""

    def __init__(self, example: Prompt, seed: int | np.random.Generator | None = None):
        super().__init__(None, None, seed)
        self.example = example

    def contains(self, x: Any) -> bool:
        """Whether x is a prompt with as many images and videos, of the same sizes."""
        return isinstance(x, Prompt) and self._sizes(x) == self._sizes(self.example)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Prompt:
        """The same text with random pixels."""

        def noise(frame: Frame) -> Frame:
            return Frame(self.np_random.integers(0, 256, frame.pixels.shape, dtype=np.uint8))

        def part(p: Part) -> Part:
            if isinstance(p, TextPart):
                return p
            if isinstance(p, ImagePart):
                return ImagePart(noise(p.frame))
            return VideoPart(tuple(noise(frame) for frame in p.frames), p.fps)

        messages = self.example.messages
        return Prompt(tuple(Message(m.role, tuple(part(p) for p in m.parts)) for m in messages))

    @staticmethod
    def _sizes(prompt: Prompt) -> tuple[Any, ...]:
        return tuple(
            tuple(f.pixels.shape for f in ((v.frame,) if isinstance(v, ImagePart) else v.frames))
            for v in prompt.visuals()
        )


class PromptEnv(gym.Wrapper[Prompt, int, WrapperObsType, Any], gym.utils.RecordConstructorArgs):
    """Turns rendered frames into prompts and action indices into actions.

    ## Description
    Each observation is a fresh chat of one user message: the rules, the last frames, the question. The environment's own
    observation is not shown: nothing is read from hidden numbers (a caption of the state can be switched on).

    ## Action Space
    `Discrete(n)`: index into `actions`, the words a policy replies with.

    ## Observation Space
    `PromptSpace`: `Prompt` objects whose frames are uint8 (height, width, 3).

    ## Rewards, Starting State, Episode End
    Those of the wrapped environment.

    ## Arguments
    env: an environment with a Discrete action space, made with `render_mode="rgb_array"`.
    settings: rules, words, frames (`prompt_settings`).
    caption: also describe the state's numbers in words.
    """

    def __init__(self, env: gym.Env[WrapperObsType, Any], settings: PromptSettings, caption: bool = False):
        gym.utils.RecordConstructorArgs.__init__(self, settings=settings, caption=caption)
        gym.Wrapper.__init__(self, cast(Any, env))
        name = env.spec.id if env.spec else type(env.unwrapped).__name__
        self.settings = settings
        self.actions = _action_words(env, settings.actions, name)
        self.rules = f"This is {name}. Choose the next action." if settings.rules is None else settings.rules
        if caption and settings.caption is None:
            raise EnvironmentSetupError(
                f"env.caption=true, but {name} has no caption; pass one to grpo_agents.envs.register_env"
            )
        self._caption = settings.caption if caption else None
        self._capture = Capture(env, settings.frames)
        frames = settings.frames
        self._frames: deque[Frame] = deque(maxlen=1 + (frames.history - 1) * frames.stride)
        self.fps = float(env.metadata.get("render_fps") or 30) / frames.stride
        self.action_space = cast(Any, spaces.Discrete(len(self.actions)))
        # Where no size is set, only the first rendered frame tells it, and `reset` corrects the space.
        width, height = frames.size or (1, 1)
        blank = Frame(np.zeros((height, width, 3), dtype=np.uint8))
        self.observation_space = PromptSpace(self._prompt_of((blank,) * frames.history))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Prompt, dict[str, Any]]:
        _, info = self.env.reset(seed=seed, options=options)
        self._frames.clear()
        self._frames.extend([self._capture.frame()] * (self._frames.maxlen or 1))
        prompt = self.prompt()
        if not self.observation_space.contains(prompt):
            self.observation_space = PromptSpace(prompt)
        return prompt, info

    def step(self, action: int) -> tuple[Prompt, SupportsFloat, bool, bool, dict[str, Any]]:
        start = getattr(self.env.action_space, "start", 0)
        _, reward, terminated, truncated, info = self.env.step(int(action) + int(start))
        self._frames.append(self._capture.frame())
        return self.prompt(), reward, terminated, truncated, info

    def prompt(self) -> Prompt:
        """The prompt for the environment as it stands."""
        history = list(self._frames)
        return self._prompt_of(tuple(history[:: self.settings.frames.stride]))

    def _prompt_of(self, frames: tuple[Frame, ...]) -> Prompt:
        shown: tuple[Part, ...] = (VideoPart(frames, self.fps),)
        if self.settings.frames.kind == "images":
            shown = tuple(ImagePart(frame) for frame in frames)
        words = self.settings.question
        if self._caption is not None and self._frames:
            words = f"{self._caption(self.env.unwrapped)} {words}"
        return Prompt((Message("user", (TextPart(self.rules), *shown, TextPart(words))),))

    def latest_frame(self) -> Frame:
        """The newest frame as the policy sees it."""
        return self._frames[-1]

    def latest_picture(self) -> np.ndarray[Any, Any]:
        """The environment rendered at full size, for people to watch: uint8 (height, width, 3)."""
        return self._capture.picture()

    def snapshot_state(self) -> dict[str, Any]:
        """What this wrapper adds to a snapshot of the environment: its window of frames (they are immutable)."""
        return {"frames": tuple(self._frames)}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Put back what `snapshot_state` returned."""
        self._frames.clear()
        self._frames.extend(state["frames"])


def make_env(config: EnvConfig) -> PromptEnv[Any]:
    """Make an environment and put it to the policy.

    Raises:
        EnvironmentSetupError: the id is unknown (with close matches), it cannot render pictures, or its actions cannot be
            named.
    """
    settings = prompt_settings(config)
    try:
        env = gym.make(config.id, render_mode="rgb_array", **config.kwargs)
    except gym.error.UnregisteredEnv as error:
        known = sorted(gym.registry)
        close = difflib.get_close_matches(config.id.rpartition(":")[2], known, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise EnvironmentSetupError(f"there is no environment {config.id!r}{hint} ({error})") from error
    except (gym.error.Error, ImportError, TypeError, ValueError) as error:
        raise EnvironmentSetupError(f"env.id={config.id} cannot be made: {error}") from error
    modes = env.metadata.get("render_modes", [])
    if env.render_mode != "rgb_array" or "rgb_array" not in modes:
        env.close()
        raise EnvironmentSetupError(
            f"{config.id} cannot be rendered to pictures: its render modes are {modes or 'none'}, and the policy sees "
            'frames. Add "rgb_array" to its metadata["render_modes"] and return uint8 (height, width, 3) from render()'
        )
    try:
        return PromptEnv(env, settings, config.caption)
    except EnvironmentSetupError:
        env.close()
        raise


def _action_words(env: gym.Env[Any, Any], given: Sequence[str] | None, name: str) -> tuple[str, ...]:
    space = env.action_space
    if not isinstance(space, spaces.Discrete):
        raise EnvironmentSetupError(
            f"{name} has the action space {space}; so far policies choose among the words of a Discrete space. Wrap the "
            "environment so that its actions are a Discrete choice"
        )
    count = int(space.n)
    if given is None:
        meanings = getattr(env.unwrapped, "get_action_meanings", None)
        given = [str(word).lower() for word in meanings()] if meanings else [str(i) for i in range(count)]
    if len(given) != count:
        raise EnvironmentSetupError(f"{name} has {count} actions and env.actions names {len(given)}: {list(given)}")
    repeated = sorted({word for word in given if list(given).count(word) > 1})
    if repeated:
        raise EnvironmentSetupError(
            f"env.actions of {name} repeats {', '.join(map(repr, repeated))}; words must differ"
        )
    return tuple(given)


__all__ = ["FrameSettings", "PromptEnv", "PromptSpace", "make_env"]
