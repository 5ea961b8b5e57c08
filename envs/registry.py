"""What is known about an environment's prompt: rules, action names, crop, history. `register_env` adds to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import gymnasium as gym

from grpo_agents.config import EnvConfig


@dataclass(frozen=True)
class FrameSettings:
    """How rendered frames become a prompt's pixels.

    Attributes:
        history: frames in a prompt.
        stride: environment steps between two of them.
        crop: (left, top, right, bottom) in rendered pixels; None keeps everything.
        size: (width, height) after the one and only resize; None keeps the crop's size.
        kind: "video" for one Qwen video of all frames, "images" for one image a frame.
        invert: swap dark and light.
    """

    history: int = 2
    stride: int = 1
    crop: tuple[int, int, int, int] | None = None
    size: tuple[int, int] | None = None
    kind: Literal["video", "images"] = "video"
    invert: bool = False


@dataclass(frozen=True)
class PromptSettings:
    """How an environment is put to the policy.

    Attributes:
        rules: static text before the frames; None derives it from the environment's id.
        actions: words in the order of the action space; None derives them.
        question: text after the frames.
        frames: see `FrameSettings`.
        caption: the state's numbers in words, given the unwrapped environment; used only with `env.caption=true`.
    """

    rules: str | None = None
    actions: tuple[str, ...] | None = None
    question: str = "Move?"
    frames: FrameSettings = FrameSettings()
    caption: Callable[[gym.Env[Any, Any]], str] | None = None


_registered: dict[str, PromptSettings] = {}


def register_env(
    env_id: str,
    *,
    rules: str | None = None,
    actions: Sequence[str] | None = None,
    question: str = "Move?",
    frames: FrameSettings | dict[str, Any] | None = None,
    caption: Callable[[gym.Env[Any, Any]], str] | None = None,
) -> None:
    """Attach prompt settings to a Gymnasium id; a later call for the same id replaces them.

    Args:
        env_id: a Gymnasium id, with its version and without a module.
        rules: what the policy is told before it sees frames. Rules that never change cost nothing: they are computed once.
        actions: one word for each action, in the order of the action space. Short words that are one token each are
            fastest.
        question: what stands after the frames.
        frames: `FrameSettings`, or a dictionary of some of its fields.
        caption: describes the state's numbers in words, for the option `env.caption`.
    """
    if isinstance(frames, dict):
        frames = FrameSettings(**frames)
    _registered[env_id] = PromptSettings(
        rules, tuple(actions) if actions is not None else None, question, frames or FrameSettings(), caption
    )


def prompt_settings(config: EnvConfig) -> PromptSettings:
    """The registered settings of an environment, with the user's own on top."""
    base = _registered.get(config.id.rpartition(":")[2], PromptSettings())
    chosen = {
        field.name: value
        for field in fields(FrameSettings)
        if (value := getattr(config.frames, field.name)) is not None
    }
    return replace(
        base,
        rules=base.rules if config.rules is None else config.rules,
        actions=base.actions if config.actions is None else tuple(config.actions),
        question=base.question if config.question is None else config.question,
        frames=replace(base.frames, **chosen),
    )


def _cartpole_caption(env: gym.Env[Any, Any]) -> str:
    x, x_dot, theta, theta_dot = (float(v) for v in env.unwrapped.state)  # type: ignore[attr-defined]
    return f"Cart at {x:+.2f} m moving {x_dot:+.2f} m/s, pole leaning {theta:+.3f} rad turning {theta_dot:+.2f} rad/s."


register_env(
    "CartPole-v1",
    rules="A pole stands on a cart. Keep the pole up and the cart on the track. Push left or right.",
    actions=("left", "right"),
    # The band in which things happen, in whole 6x6 blocks of rendered pixels: 96x32. Frames four steps (0.08 s) apart,
    # since within one step the pole moves by less than one of these pixels.
    frames=FrameSettings(history=2, stride=4, crop=(12, 140, 588, 332), size=(96, 32)),
    caption=_cartpole_caption,
)
