"""The client of vLLM servers, against stand-ins that fail as servers do. The real server: test_vllm_real_server.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from models import game_prompt, load, random_frames
from vllm_stand_in import TROUBLES, StandIn, Trouble

from grpo_agents.config import SamplerConfig
from grpo_agents.errors import ConfigError, SamplerError
from grpo_agents.policies import vllm_server
from grpo_agents.policies.action_words import ActionWords
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.policies.vllm_http import VllmClient
from grpo_agents.policies.vllm_server import VllmServerSampler
from grpo_agents.rl.episode import Sample


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_AGAIN_S", 0.01)
    monkeypatch.setattr(vllm_server, "_LOOK_S", 0.005)


@pytest.fixture(scope="module")
def learner(tiny_folders: dict[str, Path]) -> QwenVL:
    return load(tiny_folders["qwen3_vl"])


@pytest.fixture
def servers(learner: QwenVL) -> Iterator[list[StandIn]]:
    """Two servers of the learner's base model."""
    with ExitStack() as stack:
        yield [stack.enter_context(StandIn(learner.source)) for _ in range(2)]


def client(learner: QwenVL, servers: list[StandIn], **settings: float) -> VllmServerSampler:
    urls = [server.url for server in servers]
    sampler = VllmServerSampler(learner, SamplerConfig(name="vllm-server", url=urls, **settings))
    sampler.sync(1)
    return sampler


def play(sampler: VllmServerSampler, count: int = 1) -> list[Sample]:
    """Replies to as many requests at once."""
    policy = sampler.policy
    words = ActionWords.build(["left", "up"], policy.processor.tokenizer)
    encoded = policy.encode(game_prompt("video", random_frames(2)))

    async def together() -> list[Sample]:
        requests = (SampleRequest(encoded, words, np.random.default_rng(i)) for i in range(count))
        return list(await asyncio.gather(*map(sampler.sample, requests)))

    return asyncio.run(together())


def test_questions_are_spread_evenly(learner: QwenVL, servers: list[StandIn]) -> None:
    samples = play(client(learner, servers), 20)
    assert [len(server.asked) for server in servers] == [10, 10]
    assert {sample.choice for sample in samples} == {0, 1}
    for sample in samples:
        np.testing.assert_allclose(sample.choice_probs, [0.5, 0.5], rtol=1e-6)
        assert sample.policy_version == 1


def test_questions_carry_tokens_and_patches(learner: QwenVL, servers: list[StandIn]) -> None:
    play(client(learner, servers[:1]))
    (body,) = servers[0].asked
    encoded = learner.encode(game_prompt("video", random_frames(2)))
    assert body["token_ids"] == encoded.layout.ids.tolist()
    (span,) = encoded.layout.spans
    assert body["features"]["mm_placeholders"] == {"image": [{"offset": span.start, "length": span.count}]}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_one_server_fails_at_another_answers_and_it_is_taken_back(
    learner: QwenVL, servers: list[StandIn], trouble: Trouble
) -> None:
    sampler = client(learner, servers, timeout=2.0 if trouble == "silence" else 60.0)
    servers[0].troubles = [trouble]
    assert len(play(sampler, 6)) == 6
    counts = sampler.statistics()
    assert (counts["samples"], counts["passes"]) == (6, 6)
    # An adapter that is lost fails all three questions that are on their way to it, unless it is back before.
    assert 1 <= counts["retries"] <= (3 if trouble == "forgetful" else 1)
    before = len(servers[0].asked)
    while len(servers[0].asked) == before:  # the test's time limit ends it
        play(sampler, 2)
    assert sampler.statistics()["rejoins"] == 1
    assert servers[0].adapters == servers[1].adapters


def test_a_single_server_is_asked_again_until_it_answers(learner: QwenVL, servers: list[StandIn]) -> None:
    sampler = client(learner, servers[:1])
    servers[0].troubles = ["error", "forgetful", "error"]
    assert len(play(sampler)) == 1
    assert sampler.statistics()["retries"] == 3


def test_a_server_that_comes_back_on_its_port_has_the_newest_adapter(learner: QwenVL) -> None:
    with StandIn(learner.source) as first:
        sampler = client(learner, [first])
    with StandIn(learner.source, first.port) as second:
        assert len(play(sampler)) == 1
        assert list(second.adapters) == list(first.adapters)


def test_without_any_server_the_run_stops_and_says_how_to_go_on(learner: QwenVL) -> None:
    with StandIn(learner.source) as server:
        sampler = client(learner, [server], patience=0.1)
    with pytest.raises(SamplerError, match=r"for 0\.1 seconds.*Connection.*resume="):
        play(sampler)
    with pytest.raises(SamplerError, match="resume="):
        sampler.sync(2)


def test_each_version_has_a_name_of_its_own_and_the_old_one_goes(learner: QwenVL, servers: list[StandIn]) -> None:
    sampler = client(learner, servers)
    names = []
    for version in (1, 1, 2):
        sampler.sync(version)
        (name,) = servers[0].adapters
        assert Path(servers[0].adapters[name], "adapter_model.safetensors").is_file()
        assert play(sampler)[0].policy_version == version
        names.append(name)
    assert len(set(names)) == 3
    assert servers[0].asked[-1]["model"] == names[-1] or servers[1].asked[-1]["model"] == names[-1]


def test_the_untrained_model_is_the_base_without_adapter(learner: QwenVL, servers: list[StandIn]) -> None:
    sampler = client(learner, servers[:1])
    with learner.reference():
        sampler.sync(1)
    play(sampler)
    assert servers[0].asked[-1]["model"] == "base"
    assert not servers[0].adapters


def test_the_adapter_is_taken_from_the_servers_at_the_end(learner: QwenVL, servers: list[StandIn]) -> None:
    sampler = client(learner, servers)
    sampler.close()
    assert [server.adapters for server in servers] == [{}, {}]


def test_a_refused_question_is_not_asked_again(learner: QwenVL, servers: list[StandIn]) -> None:
    sampler = client(learner, servers)
    for server in servers:
        server.refuse["/inference/v1/generate"] = "the prompt is longer than the maximum model length"
    with pytest.raises(SamplerError, match="longer than the maximum model length"):
        play(sampler)
    assert sum(server.calls["/inference/v1/generate"] for server in servers) == 1


def test_a_server_that_takes_no_adapters_is_told_how_to(learner: QwenVL, servers: list[StandIn]) -> None:
    servers[0].refuse["/v1/load_lora_adapter"] = "Not Found"
    with pytest.raises(SamplerError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        client(learner, servers)


def test_log_probabilities_before_the_mask_are_refused(learner: QwenVL, servers: list[StandIn]) -> None:
    servers[0].raw_logprobs = True
    with pytest.raises(SamplerError, match="--logprobs-mode processed_logprobs"):
        play(client(learner, servers[:1]))


def test_another_base_model_is_refused(learner: QwenVL) -> None:
    with StandIn("Qwen/Qwen3-VL-2B-Instruct") as server, pytest.raises(SamplerError, match="serves Qwen/Qwen3-VL-2B"):
        client(learner, [server])


def test_what_a_server_cannot_be_given_is_refused(tiny_folders: dict[str, Path], learner: QwenVL) -> None:
    with pytest.raises(SamplerError, match=r"sampler\.url=http"):
        VllmServerSampler(learner, SamplerConfig(name="vllm-server"))
    full = load(tiny_folders["qwen3_vl"], rank=0)
    with pytest.raises(SamplerError, match="sampler=vllm"):
        VllmServerSampler(full, SamplerConfig(name="vllm-server", url=["http://localhost:8000"]))


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sampler\.url="):
        VllmClient(url, 1.0)
