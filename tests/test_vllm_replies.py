"""Replies and prompts as both vLLM samplers make them, without vLLM: the learner's own model answers the questions."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from models import KINDS, Family, game_prompt, random_frames
from test_encode import PROMPTS
from test_sampler import WORDS, trie

from grpo_agents.errors import RecordError
from grpo_agents.policies.local import LocalSampler
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.policies.sequences import TokenSequence, collate
from grpo_agents.policies.vllm_prompts import pictures
from grpo_agents.policies.vllm_replies import Answer, Question, draw_reply
from grpo_agents.rl.episode import Encoded, Sample


class Model:
    """Answers questions as an engine would, by one forward pass for each token; draws with torch's generator."""

    def __init__(self, policy: QwenVL):
        self.policy = policy
        self.questions: list[Question] = []

    async def __call__(self, question: Question) -> Answer:
        self.questions.append(question)
        if question.options is not None:
            logits = self._logits(question, list(question.tokens))[list(question.options)] / question.temperature
            return Answer([question.options[0]], [0.0], torch.log_softmax(logits, dim=-1).double().numpy())
        ids: list[int] = []
        logprobs: list[float] = []
        generator = torch.Generator().manual_seed(question.seed or 0)
        while len(ids) < question.max_tokens and self.policy.end_of_turn not in ids:
            row = torch.log_softmax(self._logits(question, ids) / question.temperature, dim=-1)
            drawn = row.argmax() if question.seed is None else torch.multinomial(row.exp(), 1, generator=generator)
            ids.append(int(drawn))
            logprobs.append(float(row[ids[-1]]))
        return Answer(ids, logprobs)

    @torch.no_grad()
    def _logits(self, question: Question, said: list[int]) -> torch.Tensor:
        place = len(question.encoded.layout.ids) + len(said)
        sequence = TokenSequence(question.encoded, np.array([*said, 0]), [place])
        return self.policy.token_logits(collate([sequence], self.policy.pad_id))[0, 0]


def reply(policy: QwenVL, request: SampleRequest, model: Model | None = None) -> Sample:
    ask = model or Model(policy)
    return asyncio.run(draw_reply(request, ask, end_of_turn=policy.end_of_turn, version=3))


def prompt(policy: QwenVL) -> Encoded:
    return policy.encode(game_prompt("video", random_frames(2)))


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("greedy", [False, True])
def test_action_words_are_those_of_the_local_sampler(
    policy: QwenVL, name: str, temperature: float, greedy: bool
) -> None:
    words = trie(policy, name)
    for seed in range(8):

        def request(seed: int = seed) -> SampleRequest:
            rng = None if greedy else np.random.default_rng(seed)
            return SampleRequest(prompt(policy), words, rng, temperature)

        ours = reply(policy, request())
        (theirs,) = LocalSampler(policy).sample_many([request()])
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert (ours.allowed, ours.choice, ours.finish) == (theirs.allowed, theirs.choice, theirs.finish)
        assert (ours.temperature, ours.greedy, ours.policy_version) == (theirs.temperature, theirs.greedy, 3)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        np.testing.assert_allclose(ours.choice_probs, theirs.choice_probs, atol=1e-5)


def test_only_decisions_are_asked_for(policy: QwenVL) -> None:
    for name in WORDS:
        model = Model(policy)
        sample = reply(policy, SampleRequest(prompt(policy), trie(policy, name), np.random.default_rng(0)), model)
        assert len(model.questions) == len(sample.decisions)
        assert [len(question.tokens) for question in model.questions] == sample.decisions.tolist()


def test_free_text_has_a_seed_from_the_episodes_stream(policy: QwenVL) -> None:
    model = Model(policy)
    samples = [
        reply(policy, SampleRequest(prompt(policy), None, np.random.default_rng(seed), 0.7, 6), model)
        for seed in (1, 1, 2)
    ]
    first, again, other = (question.seed for question in model.questions)
    assert first == again != other
    assert samples[0].ids.tolist() == samples[1].ids.tolist() != samples[2].ids.tolist()
    assert {sample.temperature for sample in samples} == {0.7}


def test_greedy_free_text_is_that_of_the_local_sampler_at_temperature_one(policy: QwenVL) -> None:
    ours = reply(policy, SampleRequest(prompt(policy), None, None, 0.7, 6))
    (theirs,) = LocalSampler(policy).sample_many([SampleRequest(prompt(policy), None, None, 1.0, 6)])
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert (ours.temperature, ours.greedy, ours.finish) == (1.0, True, theirs.finish)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize(("last", "finish"), [("end", "stop"), ("other", "length")])
def test_free_text_stops_at_the_end_of_turn_alone(policy: QwenVL, last: str, finish: str) -> None:
    token = policy.end_of_turn if last == "end" else 5

    async def ask(question: Question) -> Answer:
        assert question.parameters(policy.end_of_turn)["stop_token_ids"] == [policy.end_of_turn]
        return Answer([5, token], [-1.0, -2.0])

    sample = asyncio.run(
        draw_reply(SampleRequest(prompt(policy), None, None), ask, end_of_turn=policy.end_of_turn, version=0)
    )
    assert sample.finish == finish
    assert sample.ids.tolist() == [5, token]


@pytest.mark.parametrize("name", PROMPTS)
def test_pictures_stand_at_all_placeholder_tokens_and_hold_all_patches(policy: QwenVL, name: str) -> None:
    encoded = policy.encode(PROMPTS[name])
    encoder = policy.encode
    items = pictures(encoded, encoder)
    placeholders = np.isin(encoded.layout.ids, [encoder.image_token_id, encoder.video_token_id])
    covered = np.zeros_like(placeholders)
    for item in items:
        covered[item.span.start : item.span.start + item.span.count] = True
    np.testing.assert_array_equal(covered, placeholders)
    ours = [item.tensors(encoder) for item in items]
    pixels = [tensors.get("pixel_values", tensors.get("pixel_values_videos")) for tensors in ours]
    flat = [patch for entry in pixels if entry is not None for patch in entry[0]]
    whole = [patch for visual in encoded.visuals for patch in encoder.raw_patches([visual])[0]]
    assert len(flat) == len(whole)
    assert all(torch.equal(a, b) for a, b in zip(flat, whole, strict=True))


def test_a_temporal_patch_is_an_image_and_several_in_one_run_are_a_video(policy: QwenVL, family: Family) -> None:
    encoded = policy.encode(game_prompt("video", random_frames(4)))
    kinds = [item.modality for item in pictures(encoded, policy.encode)]
    assert kinds == (["image", "image"] if family == "qwen3_vl" else ["video"])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_pictures_alone_have_equal_digests(policy: QwenVL, kind: str) -> None:
    def digests(seed: int, width: int = 32) -> list[str]:
        encoded = policy.encode(game_prompt(kind, random_frames(2, width, seed=seed)))
        return [item.digest for item in pictures(encoded, policy.encode)]

    assert digests(1) == digests(1)
    assert not set(digests(1)) & set(digests(2))
    assert not set(digests(1)) & set(digests(1, 16))


def test_pixels_that_are_not_those_of_the_placeholders_are_refused(policy: QwenVL) -> None:
    encoded = policy.encode(game_prompt("images", random_frames(1, 32)))
    with pytest.raises(RecordError, match="48x16"):
        pictures(Encoded(encoded.layout, (random_frames(1, 48),)), policy.encode)
    with pytest.raises(RecordError, match="more pictures"):
        pictures(Encoded(encoded.layout, encoded.visuals * 2), policy.encode)
    with pytest.raises(RecordError, match="more runs"):
        pictures(Encoded(encoded.layout, ()), policy.encode)
