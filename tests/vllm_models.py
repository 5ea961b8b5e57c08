"""Checkpoints that vLLM can run on a CPU, and what the tests of its engine and of its server have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from models import CORPUS, Family, game_prompt, random_frames

from grpo_agents.policies.action_words import ActionWords
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import Sampler, SampleRequest
from grpo_agents.policies.sequences import TokenSequence, collate
from grpo_agents.rl.episode import Encoded, Sample

# One token each, several, and beginnings of one another: one, two and three decisions.
WORDS = ["left", "right", "left fast", "press", "presumably"]
CASES = [("images", 1), ("images", 3), ("video", 2), ("video", 4)]
"""Kind and number of the frames of a prompt."""


def save_checkpoint(folder: Path, family: Family) -> None:
    """Write a random model whose sizes vLLM's CPU kernels take: attention heads of 32, and SiLU in Qwen2.5's tower."""
    from grpo_agents.policies.tiny import build_model, build_processor, train_tokenizer

    tokenizer = train_tokenizer(CORPUS, 320)
    model = build_model(tokenizer, family, seed=0, hidden=128)
    if family == "qwen2_5_vl":
        model.config.vision_config.hidden_act = "silu"
    model.save_pretrained(folder)
    build_processor(tokenizer, family).save_pretrained(folder)


def moved(policy: QwenVL, seed: int) -> None:
    """Give every trained weight another value near that of the first call: updates that do not add up."""
    start = _STARTS.setdefault(policy, [weight.detach().clone() for weight in policy.trainable_parameters()])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight, first in zip(policy.trainable_parameters(), start, strict=True):
            weight.copy_(first + 0.05 * torch.randn(first.shape, generator=generator))


_STARTS: WeakKeyDictionary[QwenVL, list[torch.Tensor]] = WeakKeyDictionary()


def prompts(policy: QwenVL) -> list[Encoded]:
    """A prompt of each case, its rules long enough to fill blocks of the prefix cache."""
    return [
        policy.encode(game_prompt(kind, random_frames(count, seed=count), rules=20 * "Keep the pole up. "))
        for kind, count in CASES
    ]


def requests(policy: QwenVL, words: bool, *, greedy: bool = False, temperature: float = 0.7) -> list[SampleRequest]:
    """Three requests for each prompt, each with a stream of its own."""
    actions = ActionWords.build(WORDS, policy.processor.tokenizer) if words else None
    return [
        SampleRequest(encoded, actions, None if greedy else np.random.default_rng(seed), temperature, 6)
        for encoded in prompts(policy)
        for seed in range(3)
    ]


def play(sampler: Sampler, asked: Sequence[SampleRequest]) -> list[Sample]:
    """Replies to all requests at once."""

    async def together() -> list[Sample]:
        return list(await asyncio.gather(*map(sampler.sample, asked)))

    return asyncio.run(together())


def largest_difference(policy: QwenVL, asked: Sequence[SampleRequest], samples: Sequence[Sample]) -> float:
    """Between the samples' log-probabilities and the learner's, over all decisions."""
    worst = 0.0
    for request, sample in zip(asked, samples, strict=True):
        batch = collate([TokenSequence.of_sample(request.encoded, sample)], policy.pad_id)
        with torch.no_grad():
            logprobs, _ = policy(batch, sample.temperature)
        worst = max(worst, float(np.abs(logprobs[0].numpy() - sample.logprobs[sample.decisions]).max()))
    return worst
