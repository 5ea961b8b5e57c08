"""The records of play: what the policy saw, what it said, what came of it.

Data moves one way: Prompt -> Encoded -> Sample -> Step -> Episode -> Group. Every record is complete: token ids as they
were sampled, log-probabilities under the distribution really sampled from, the pixels and their hash, the policy version
and the seed. Nothing is decoded and encoded again later.

Notation in shapes: B sequences, T steps of an episode, L tokens, G group members, P prompts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_agents.errors import RecordError


class EndReason(Enum):
    """Why an episode ended. These are four things and are never merged."""

    TERMINATED = "terminated"
    """The environment said so: a failure or a success of the task itself."""
    TRUNCATED = "truncated"
    """A time limit outside the task; the task would have gone on."""
    FAULT = "fault"
    """The environment raised, hung or died; such an episode is no training data."""
    STOPPED = "stopped"
    """We ended it early (a restart's horizon, a cancelled run); the task would have gone on."""


@dataclass(frozen=True, eq=False)
class Frame:
    """One picture after the one and only resize: uint8 of shape (height, width, 3)."""

    pixels: NDArray[np.uint8]

    @cached_property
    def digest(self) -> bytes:
        """16-byte BLAKE2 hash of shape and pixels."""
        return hashlib.blake2b(
            np.ascontiguousarray(self.pixels).data, digest_size=16, person=str(self.pixels.shape).encode()[:16]
        ).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    frame: Frame


@dataclass(frozen=True)
class VideoPart:
    """Frames oldest first; `fps` is the rate at which they were taken (Qwen3-VL writes it into the prompt)."""

    frames: tuple[Frame, ...]
    fps: float


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Prompt:
    """A chat: what `apply_chat_template` takes, with frames as objects. Static text comes first, frames next, the question
    last, so that everything before the first frame is the same for all steps."""

    messages: tuple[Message, ...]

    def as_chat(self) -> list[dict[str, Any]]:
        """The messages in the dictionaries that `apply_chat_template` and qwen-vl-utils take (pixels left out)."""
        kinds = {TextPart: "text", ImagePart: "image", VideoPart: "video"}
        return [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": kinds[type(part)]}
                    for part in message.parts
                ],
            }
            for message in self.messages
        ]

    def visuals(self) -> tuple[ImagePart | VideoPart, ...]:
        """Images and videos in reading order."""
        return tuple(part for message in self.messages for part in message.parts if not isinstance(part, TextPart))


@dataclass(frozen=True)
class VisualSpan:
    """An unbroken run of placeholder tokens: an image, a whole video (Qwen2.5-VL) or one temporal patch of it (Qwen3-VL).

    Attributes:
        start: index of its first placeholder token.
        count: number of placeholder tokens: temporal * height * width / merge**2.
        grid: (temporal, height, width) in patches.
    """

    start: int
    count: int
    grid: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Layout:
    """The tokens of all prompts that differ in pixels alone. Compared by identity: the encoder makes each layout once.

    Attributes:
        ids: int64 (L,), placeholders expanded.
        position_ids: int64 (3, L), the temporal, height and width positions of M-RoPE.
        spans: the visual spans in order.
        prefix: number of tokens before the first span: the part that never changes.
    """

    ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    spans: tuple[VisualSpan, ...]
    prefix: int

    @property
    def next_position(self) -> int:
        """M-RoPE position of the first completion token."""
        return int(self.position_ids.max()) + 1


@dataclass(frozen=True, eq=False)
class Encoded:
    """A prompt as the model takes it: a layout, and the pixels of its images and videos in order.

    Attributes:
        layout: tokens and positions.
        visuals: one tuple of frames for each image (one frame) or video (all its frames).
        fps: rate of the videos in frames a second, None for images: what a server needs to rebuild the prompt.
    """

    layout: Layout
    visuals: tuple[tuple[Frame, ...], ...]
    fps: float | None = None

    @cached_property
    def observation_hash(self) -> str:
        """Hex digest over tokens and pixels: equal prompts, and only those, have equal hashes."""
        digest = hashlib.blake2b(self.layout.ids.tobytes(), digest_size=16)
        for frames in self.visuals:
            for frame in frames:
                digest.update(frame.digest)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Sample:
    """One reply as it was drawn.

    Attributes:
        ids: int64 (L,), the completion's tokens exactly as sampled.
        logprobs: float32 (L,), natural log-probability of each token under the distribution sampled from: after the
            temperature and, where `allowed` is given, renormalised over the allowed tokens.
        allowed: for each token the ids it was chosen from, ascending; None for free text (the whole vocabulary).
        choice: index of the chosen action word; None for free text.
        choice_probs: float32 (A,), probability of each action word at its first token's decision; None for free text.
        policy_version: number of updates behind the weights that were sampled from.
        temperature: what the logits were divided by.
        greedy: the likeliest tokens were taken instead of drawing; logprobs are still those of the distribution.
        finish: "action" (an action word is complete), "stop" (end-of-turn token) or "length".
        features: the vision features computed for the prompt when the tower is frozen; opaque to all but the policy.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    allowed: tuple[tuple[int, ...], ...] | None
    choice: int | None
    choice_probs: NDArray[np.float32] | None
    policy_version: int
    temperature: float
    greedy: bool
    finish: str
    features: Any = None

    @cached_property
    def decisions(self) -> NDArray[np.int64]:
        """Indices of the tokens that could have been others: all of free text, and of an action word those that tell it
        from the other words. Only these have a gradient; the rest are certain, with log-probability 0."""
        if self.allowed is None:
            return np.arange(len(self.ids))
        return np.array([i for i, options in enumerate(self.allowed) if len(options) > 1], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Step:
    """One decision and what followed.

    Attributes:
        encoded: the prompt.
        sample: the reply.
        action: what was given to `env.step`.
        valid: whether the reply was an action; an invalid reply's action is the environment side's fallback.
        reward: the environment's reward for this step.
        terminated, truncated: as `env.step` returned them.
        observation_hash: hash of the prompt, 32 hex digits.
    """

    encoded: Encoded
    sample: Sample
    action: Any
    valid: bool
    reward: float
    terminated: bool
    truncated: bool
    observation_hash: str


@dataclass(eq=False)
class Episode:
    """Steps from one start to one end.

    Attributes:
        steps: T steps.
        end: why it ended.
        seed: the seed given to `env.reset` (for a restart: the seed of the episode it continues).
        start: "reset" or "restart".
        member: index within its group.
        scores: total of each named reward; None where it could not grade.
        step_rewards: float64 (T,), the weighted sum of the named rewards by step; None until graded, or ungradable.
        values: float64 (T,), what each step's observation is worth; None where the advantage does not need it.
        fault: traceback of a fault.
    """

    steps: list[Step]
    end: EndReason
    seed: int
    start: str = "reset"
    member: int = 0
    scores: dict[str, float | None] = field(default_factory=dict)
    step_rewards: NDArray[np.float64] | None = None
    values: NDArray[np.float64] | None = None
    fault: str | None = None

    @property
    def rewards(self) -> NDArray[np.float64]:
        """The environment's rewards, (T,)."""
        return np.array([step.reward for step in self.steps], dtype=np.float64)

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the environment's rewards."""
        return float(self.rewards.sum())

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(eq=False)
class Group:
    """G episodes from one and the same start, verified by the hash of their first prompts.

    Raises:
        RecordError: the members' first prompts differ, as they do when a seed does not determine an environment's start.
    """

    episodes: list[Episode]

    def __post_init__(self) -> None:
        firsts = {episode.steps[0].observation_hash for episode in self.episodes if episode.steps}
        if len(firsts) > 1:
            seed = self.episodes[0].seed
            raise RecordError(
                f"the {len(self.episodes)} members of a group do not share their start: seed {seed} led to {len(firsts)} "
                "different first prompts. The environment's reset is not determined by its seed; let it draw only from "
                "self.np_random."
            )

    @property
    def seed(self) -> int:
        return self.episodes[0].seed
