"""Whether the sampler plays with the weights that the learner has.

After every update both answer one fixed prompt. Weights that did not arrive, an adapter that was confused with an older
one, a cache that holds what older weights computed: each shows as a difference of log-probabilities.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_agents.errors import SamplerError
from grpo_agents.policies.action_words import ActionWords
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import Sampler, SampleRequest
from grpo_agents.policies.sequences import TokenSequence, collate
from grpo_agents.rl.episode import Encoded, Frame, ImagePart, Message, Prompt, Sample, TextPart, VideoPart

BOUNDS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest difference that rounding explains. The engines of sampler and learner add up in different orders."""

_REPLY = 8
_REMEMBERED = 8
_TEXT = (
    "One picture, then two frames of a film. Say what you see: what is dark, what is light, what moves, and where to. "
)


class Canary:
    """Compares sampler and learner on a prompt of text, an image and a video: a greedy free reply, and action words.

    Args:
        policy: the model that learns.
        words: the action words that are played with; None where replies are free.
        temperature: of play.
        bound: largest difference tolerated; None takes that of the policy's dtype (`BOUNDS`).
    """

    def __init__(self, policy: QwenVL, words: ActionWords | None, temperature: float = 1.0, bound: float | None = None):
        self.policy = policy
        self.words = words
        self.temperature = temperature
        self.bound = BOUNDS[policy.core.dtype] if bound is None else bound
        self._encoded = policy.encode(fixed_prompt(policy.encode.factor))
        self._learned: dict[int, NDArray[np.float64]] = {}

    def check(self, sampler: Sampler) -> float:
        """Largest difference of log-probabilities between sampler and learner, after a sync.

        Raises:
            SamplerError: it is above the bound, and the run would learn from what another policy did.
        """
        free, worded = asyncio.run(self._replies(sampler))
        difference = self._difference(free)
        sampled = free
        if worded is not None:
            difference = max(difference, self._difference(worded))
            learned = self._choice_logprobs(worded)
            self._learned[self.policy.version] = learned
            while len(self._learned) > _REMEMBERED:
                del self._learned[min(self._learned)]
            sampled = worded
        if not difference <= self.bound:
            raise SamplerError(self._explain(difference, sampled))
        return difference

    async def _replies(self, sampler: Sampler) -> tuple[Sample, Sample | None]:
        free = SampleRequest(self._encoded, None, None, self.temperature, _REPLY)
        if self.words is None:
            return await sampler.sample(free), None
        worded = SampleRequest(self._encoded, self.words, None, self.temperature)
        first, second = await asyncio.gather(sampler.sample(free), sampler.sample(worded))
        return first, second

    @torch.no_grad()
    def _difference(self, sample: Sample) -> float:
        if not len(sample.decisions):
            return 0.0
        batch = collate([_sequence(self._encoded, sample)], self.policy.pad_id, self.policy.device)
        logprobs, _ = self.policy(batch, sample.temperature)
        sampled = torch.from_numpy(sample.logprobs[sample.decisions])
        difference = float((logprobs[0].cpu() - sampled).abs().max())
        if sample.choice_probs is not None:
            learned = np.exp(self._choice_logprobs(sample))
            difference = max(difference, float(np.abs(learned - sample.choice_probs).max()))
        return difference

    @torch.no_grad()
    def _choice_logprobs(self, sample: Sample) -> NDArray[np.float64]:
        """The learner's log-probability of each action word at its first decision, (A,)."""
        assert self.words is not None
        batch = collate([_sequence(self._encoded, sample)], self.policy.pad_id, self.policy.device)
        firsts = self.words.first_tokens()
        logits: Tensor = self.policy.token_logits(batch)[0, 0].double() / self.temperature
        options = sorted(set(firsts))
        logprobs = dict(zip(options, torch.log_softmax(logits[options], dim=-1).tolist(), strict=True))
        return np.array([logprobs[token] for token in firsts])

    def _explain(self, difference: float, sample: Sample) -> str:
        learner = self.policy.version
        held = f"says that it has version {sample.policy_version}"
        if sample.choice_probs is not None:
            for version, learned in sorted(self._learned.items(), reverse=True):
                if version != learner and np.abs(np.exp(learned) - sample.choice_probs).max() <= self.bound:
                    held += f" and answers like version {version}"
                    break
        dtype = str(self.policy.core.dtype).removeprefix("torch.")
        return (
            f"the sampler does not play with the learner's weights: on a fixed prompt their log-probabilities differ by "
            f"{difference:.2g}, and rounding in {dtype} explains at most {self.bound:g} (sampler.canary). The learner has "
            f"version {learner}; the sampler {held}. Servers must read the adapters' folder (sampler.adapters) under the "
            "same path and serve the same base model in the same dtype"
        )


def fixed_prompt(factor: int) -> Prompt:
    """The same prompt in every run.

    Args:
        factor: sides of its frames are multiples of this many pixels.
    """
    rng = np.random.default_rng(0)
    frames = [Frame(rng.integers(0, 256, (2 * factor, 4 * factor, 3), dtype=np.uint8)) for _ in range(3)]
    # The text reaches over several blocks of a prefix cache, so that one that went stale is seen.
    parts = (TextPart(2 * _TEXT), ImagePart(frames[0]), VideoPart(tuple(frames[1:]), 10.0), TextPart("Answer: "))
    return Prompt((Message("user", parts),))


def _sequence(encoded: Encoded, sample: Sample) -> TokenSequence:
    """The sample's decisions, with vision features computed anew: those kept by the sampler are what is checked."""
    decisions = sample.decisions.tolist()
    allowed = None if sample.allowed is None else tuple(sample.allowed[i] for i in decisions)
    start = len(encoded.layout.ids)
    return TokenSequence(encoded, sample.ids, [start + i for i in decisions], allowed, None)
