"""What every sampler offers: a reply to a prompt, drawn with the current weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from grpo_agents.policies.action_words import ActionWords
from grpo_agents.rl.episode import Encoded, Sample


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One reply that is wanted.

    Attributes:
        encoded: the prompt.
        actions: the words the reply is chosen from; None for free text.
        rng: the episode's own stream, one uniform number a token, so that a reply does not depend on which other requests
            were answered beside it; None takes the likeliest token.
        temperature: divides the logits; the learner divides by the same.
        max_new_tokens: longest free reply.
    """

    encoded: Encoded
    actions: ActionWords | None
    rng: np.random.Generator | None
    temperature: float = 1.0
    max_new_tokens: int = 32


class Sampler(Protocol):
    """Draws replies. Implementations batch whatever requests wait at the same time."""

    async def sample(self, request: SampleRequest) -> Sample:
        """Draw one reply."""
        ...

    def sync(self, version: int) -> None:
        """Take over the learner's weights; later samples carry `version`."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Counters since the last call: samples, tokens, forward passes, seconds."""
        ...
