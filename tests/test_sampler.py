"""The local sampler: what it draws, with which probabilities, and what it computes again."""

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from models import KINDS, game_prompt, load, random_frames, stirred

from grpo_agents.policies.action_words import ActionWords
from grpo_agents.policies.local import LocalSampler
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.policies.sequences import TokenSequence, collate
from grpo_agents.rl.episode import Encoded, Sample

WORDS = {
    "one token each": ["left", "up"],
    "several tokens": ["right", "press", "up", "presumably"],
    "beginnings of one another": ["left", "left fast", "left fast now", "up", "upward"],
    "a shared beginning": ["press left", "press up"],
}


def trie(policy: QwenVL, name: str) -> ActionWords:
    return ActionWords.build(WORDS[name], policy.processor.tokenizer)


def encoded(policy: QwenVL, seed: int, kind: str = "video") -> Encoded:
    return policy.encode(game_prompt(kind, random_frames(2, 32, 16, seed=seed)))


def requests(
    policy: QwenVL, count: int, words: ActionWords | None, *, kind: str = "video", **settings: Any
) -> list[SampleRequest]:
    return [
        SampleRequest(encoded(policy, seed, kind), words, np.random.default_rng(seed), **settings)
        for seed in range(count)
    ]


def learned(policy: QwenVL, asked: Sequence[SampleRequest], samples: Sequence[Sample]) -> list[np.ndarray]:
    """The learner's log-probabilities of each reply's decisions, all replies in one batch."""
    sequences = [TokenSequence.of_sample(r.encoded, s) for r, s in zip(asked, samples, strict=True)]
    batch = collate(sequences, policy.pad_id)
    with torch.no_grad():
        logprobs, _ = policy(batch, samples[0].temperature)
    return [row[mask].numpy() for row, mask in zip(logprobs, batch.mask, strict=True)]


def word_logprobs(policy: QwenVL, prompt: Encoded, words: ActionWords, temperature: float) -> np.ndarray:
    """Log-probability of every action word, from the learner's forward pass over all paths of the trie."""
    paths: dict[int, tuple[list[int], list[tuple[int, ...]]]] = {}

    def walk(node: Any, said: list[int], allowed: list[tuple[int, ...]]) -> None:
        if node.choice is not None:
            paths[node.choice] = said, allowed
        for token, child in node.children.items():
            walk(child, [*said, token], [*allowed, node.options])

    walk(words.root, [], [])
    start = len(prompt.layout.ids)
    sequences = [
        TokenSequence(prompt, np.array(said), range(start, start + len(said)), tuple(allowed))
        for said, allowed in (paths[choice] for choice in range(len(words.words)))
    ]
    with torch.no_grad():
        logprobs, _ = policy(collate(sequences, policy.pad_id), temperature)
    return logprobs.double().sum(1).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_action_words_are_the_learners(policy: QwenVL, name: str, temperature: float, kind: str) -> None:
    words = trie(policy, name)
    asked = requests(policy, 24, words, kind=kind, temperature=temperature)
    samples = LocalSampler(policy).sample_many(asked)
    assert len({sample.choice for sample in samples}) > 1
    for sample, expected in zip(samples, learned(policy, asked, samples), strict=True):
        # float32 logits of size 5 from two passes that sum in another order.
        np.testing.assert_allclose(sample.logprobs[sample.decisions], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_free_text_are_the_learners(policy: QwenVL, temperature: float, kind: str) -> None:
    asked = requests(policy, 8, None, kind=kind, temperature=temperature, max_new_tokens=7)
    samples = LocalSampler(policy).sample_many(asked)
    for sample, expected in zip(samples, learned(policy, asked, samples), strict=True):
        assert sample.allowed is None and sample.choice is None and sample.choice_probs is None
        np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", WORDS)
def test_a_sample_says_what_was_chosen_from_what(policy: QwenVL, name: str) -> None:
    words = trie(policy, name)
    end = policy.processor.tokenizer.eos_token
    for sample in LocalSampler(policy).sample_many(requests(policy, 12, words, temperature=2.0)):
        assert sample.choice is not None and sample.allowed is not None and sample.choice_probs is not None
        assert policy.processor.tokenizer.decode(sample.ids).removesuffix(end) == words.words[sample.choice]
        node = words.root
        for token, options, logprob in zip(sample.ids.tolist(), sample.allowed, sample.logprobs, strict=True):
            assert options == node.options
            assert logprob < 0 if len(options) > 1 else logprob == 0
            node = node.children[token]
        assert node.choice == sample.choice
        assert (sample.temperature, sample.greedy, sample.finish) == (2.0, False, "action")
        # The first decision: words that part later share one probability.
        first = sample.decisions[0]
        by_token = dict(zip(words.first_tokens(), sample.choice_probs.tolist(), strict=True))
        assert sum(by_token.values()) == pytest.approx(1.0, abs=1e-6)
        assert np.log(by_token[sample.ids[first]]) == pytest.approx(sample.logprobs[first], abs=1e-6)


@pytest.mark.parametrize("name", ["several tokens", "beginnings of one another"])
def test_words_are_drawn_as_often_as_their_probabilities_say(policy: QwenVL, name: str) -> None:
    words, prompt, draws = trie(policy, name), encoded(policy, 3), 2000
    temperature = 2.5
    probabilities = np.exp(word_logprobs(policy, prompt, words, temperature))
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-6)
    asked = [SampleRequest(prompt, words, np.random.default_rng(seed), temperature) for seed in range(draws)]
    samples = LocalSampler(policy).sample_many(asked)
    counts = np.bincount([s.choice for s in samples if s.choice is not None], minlength=len(words.words))
    expected = draws * probabilities
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    # 99.9% quantiles of chi-square with 3 and 4 degrees of freedom.
    assert statistic < {4: 16.27, 5: 18.47}[len(words.words)]


@pytest.mark.parametrize("name", WORDS)
def test_greedy_takes_the_likeliest_token_of_each_decision(policy: QwenVL, name: str) -> None:
    words = trie(policy, name)
    asked = [SampleRequest(encoded(policy, seed), words, None) for seed in range(6)]
    for request, sample in zip(asked, LocalSampler(policy).sample_many(asked), strict=True):
        assert sample.greedy
        node, said = words.root, []
        while node.choice is None:
            start = len(request.encoded.layout.ids)
            tried = [
                TokenSequence(request.encoded, np.array([*said, token]), [start + len(said)], (node.options,))
                for token in node.options
            ]
            with torch.no_grad():
                logprobs, _ = policy(collate(tried, policy.pad_id))
            said.append(node.options[int(logprobs[:, 0].argmax())])
            node = node.children[said[-1]]
        assert sample.ids.tolist() == said


@pytest.fixture(scope="module")
def precise(policy: QwenVL) -> QwenVL:
    """The same policy in float64: what is left of a difference is a mistake, not the order of a sum."""
    return copy.deepcopy(policy).double()


@pytest.mark.parametrize("name", [*WORDS, None])
def test_a_reply_depends_neither_on_batch_size_nor_on_company(precise: QwenVL, name: str | None) -> None:
    words = trie(precise, name) if name else None

    def ask() -> list[SampleRequest]:
        return requests(precise, 7, words, max_new_tokens=5)

    alone = LocalSampler(precise, batch_size=1).sample_many(ask())
    other = ActionWords.build(["down", "left"], precise.processor.tokenizer)
    company = requests(precise, 3, other, kind="images") + requests(precise, 3, words, temperature=3.0)
    together = LocalSampler(precise).sample_many(ask())
    in_company = LocalSampler(precise, batch_size=4).sample_many([*company, *ask()[::-1]])[len(company) :][::-1]
    for expected, *others in zip(alone, together, in_company, strict=True):
        for sample in others:
            assert sample.ids.tolist() == expected.ids.tolist()
            # Log-probabilities down to -8, kept in float32.
            np.testing.assert_allclose(sample.logprobs, expected.logprobs, rtol=0, atol=1e-6)


def test_free_text_ends_with_the_end_of_turn_or_at_the_limit(policy: QwenVL) -> None:
    # At this temperature all 312 tokens are about equally likely, the end of turn among them.
    limits = [1 + i % 8 for i in range(250)]
    asked = [
        SampleRequest(encoded(policy, 0), None, np.random.default_rng(seed), 50.0, limit)
        for seed, limit in enumerate(limits)
    ]
    samples = LocalSampler(policy).sample_many(asked)
    assert {sample.finish for sample in samples} == {"stop", "length"}
    for sample, limit in zip(samples, limits, strict=True):
        ends = np.flatnonzero(sample.ids == policy.end_of_turn).tolist()
        if sample.finish == "stop":
            assert ends == [len(sample.ids) - 1] and len(sample.ids) <= limit
        else:
            assert not ends and len(sample.ids) == limit


class Counted:
    """Counts the calls of one method of a policy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: QwenVL, name: str):
        self.prompts = 0
        method = getattr(policy, name)

        def counting(argument: Any) -> Any:
            self.prompts += len(argument)
            return method(argument)

        monkeypatch.setattr(policy, name, counting)


def test_the_prefix_is_computed_once_for_each_version_of_the_weights(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = stirred(load(folder))
    words = trie(policy, "one token each")
    counted = Counted(monkeypatch, policy, "prefix_cache")
    sampler = LocalSampler(policy)
    for _ in range(3):
        sampler.sample_many(requests(policy, 2, words))
    assert counted.prompts == 2
    stirred(policy, seed=1)
    sampler.sync(5)
    after = sampler.sample_many(requests(policy, 2, words))
    assert counted.prompts == 4
    assert [sample.policy_version for sample in after] == [5, 5]
    fresh = LocalSampler(policy).sample_many(requests(policy, 2, words))
    assert [sample.logprobs.tolist() for sample in after] == [sample.logprobs.tolist() for sample in fresh]


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_features_of_a_frozen_tower_are_kept_and_those_of_a_trained_one_dropped(
    folder: Any, monkeypatch: pytest.MonkeyPatch, vision: str
) -> None:
    policy = stirred(load(folder, vision=vision))
    words = trie(policy, "one token each")
    counted = Counted(monkeypatch, policy, "vision")
    sampler = LocalSampler(policy)
    asked = requests(policy, 4, words) + requests(policy, 4, words)  # each frame twice
    before = sampler.sample_many(asked)
    sampler.sample_many(requests(policy, 4, words))
    assert counted.prompts == 4
    assert all((sample.features is not None) == (vision == "frozen") for sample in before)
    sampler.sync(1)
    sampler.sample_many(requests(policy, 4, words))
    assert counted.prompts == (4 if vision == "frozen" else 8)


def test_samples_with_kept_features_train_as_those_without(policy: QwenVL) -> None:
    words = trie(policy, "several tokens")
    asked = requests(policy, 5, words)
    samples = LocalSampler(policy).sample_many(asked)
    kept = [TokenSequence.of_sample(r.encoded, s) for r, s in zip(asked, samples, strict=True)]
    bare = [TokenSequence(s.encoded, s.completion, s.targets, s.allowed) for s in kept]
    with torch.no_grad():
        (expected, _), (logprobs, _) = (policy(collate(part, policy.pad_id)) for part in (bare, kept))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)


def test_episodes_that_wait_together_share_one_forward_pass(policy: QwenVL) -> None:
    sampler = LocalSampler(policy)
    asked = requests(policy, 6, trie(policy, "one token each"))

    async def play(request: SampleRequest, rounds: int) -> list[Sample]:
        return [await sampler.sample(request) for _ in range(rounds)]

    async def together() -> list[list[Sample]]:
        return await asyncio.gather(*(play(request, rounds) for rounds, request in enumerate(asked)))

    played = asyncio.run(together())
    assert [len(samples) for samples in played] == [0, 1, 2, 3, 4, 5]
    counts = sampler.statistics()
    assert (counts["samples"], counts["tokens"], counts["passes"]) == (15, 15, 5)
    assert 0 < counts["model_seconds"] < counts["seconds"]
    assert sampler.statistics() == dict.fromkeys(counts, 0)


def test_a_failure_of_the_model_reaches_every_waiting_episode(policy: QwenVL, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = LocalSampler(policy)
    asked = requests(policy, 3, trie(policy, "one token each"))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    async def together() -> list[Any]:
        return await asyncio.gather(*map(sampler.sample, asked), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(policy, "hidden", fail)
        failures = asyncio.run(together())
    assert [str(failure) for failure in failures] == ["out of memory"] * 3
    assert all(isinstance(sample, Sample) for sample in asyncio.run(together()))


def test_an_episode_that_gave_up_does_not_disturb_the_others(policy: QwenVL) -> None:
    sampler = LocalSampler(policy)
    asked = requests(policy, 3, trie(policy, "one token each"))

    async def together() -> list[Any]:
        tasks = [asyncio.create_task(sampler.sample(request)) for request in asked]
        asyncio.get_running_loop().call_soon(tasks[1].cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = asyncio.run(together())
    assert isinstance(second, asyncio.CancelledError)
    assert isinstance(first, Sample) and isinstance(third, Sample)
