"""Samples a second of the local sampler, of vLLM in this process and of vLLM servers, at several numbers of environments.

    python experiments/bench_samplers.py policy=FOLDER [samplers=local,vllm] [counts=1,16,64] [seconds=10] [url=http://...]

Every environment is a coroutine that asks for its next action as soon as it has the last one; its frames are random and
never repeat, so that no sampler can remember features. `sync` is the time from the end of an update to the first sample
with the new weights; `outside` is the share of time that the sampler spends outside the model or the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

from grpo_agents.config import LoraConfig, PolicyConfig, SamplerConfig
from grpo_agents.policies.action_words import ActionWords
from grpo_agents.policies.local import LocalSampler
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import Sampler, SampleRequest
from grpo_agents.rl.episode import Encoded, Frame, Message, Prompt, TextPart, VideoPart

SIZE = (96, 32)
"""Width and height of a frame, those of CartPole's prompts."""
SYNCS = 5


def make_sampler(name: str, policy: QwenVL, urls: list[str]) -> Sampler:
    if name == "local":
        return LocalSampler(policy)
    if name == "vllm":
        from grpo_agents.policies.vllm_engine import VllmSampler

        return VllmSampler(policy, SamplerConfig(name="vllm"))
    from grpo_agents.policies.vllm_server import VllmServerSampler

    return VllmServerSampler(policy, SamplerConfig(name="vllm-server", url=urls))


def prompt(policy: QwenVL, rng: np.random.Generator) -> Encoded:
    """Two frames nobody has seen, and the text of a game."""
    width, height = SIZE
    frames = tuple(Frame(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for _ in range(2))
    parts = (TextPart("Keep the pole up."), VideoPart(frames, 50.0), TextPart("Move"))
    return policy.encode(Prompt((Message("user", parts),)))


def rate(sampler: Sampler, policy: QwenVL, words: ActionWords, environments: int, seconds: float) -> dict[str, float]:
    """Samples a second with as many environments, and the share of the time outside the model."""
    end = time.perf_counter() + seconds

    async def environment(seed: int) -> int:
        rng = np.random.default_rng(seed)
        samples = 0
        while time.perf_counter() < end:
            await sampler.sample(SampleRequest(prompt(policy, rng), words, rng))
            samples += 1
        return samples

    async def together() -> int:
        return sum(await asyncio.gather(*map(environment, range(environments))))

    sampler.statistics()
    begin = time.perf_counter()
    samples = asyncio.run(together())
    spent = time.perf_counter() - begin
    counts = sampler.statistics()
    return {"samples_per_second": samples / spent, "outside": 1.0 - counts["model_seconds"] / spent}


def sync_seconds(sampler: Sampler, policy: QwenVL, words: ActionWords) -> float:
    """Median time from new weights to the first sample drawn with them."""
    times = []
    rng = np.random.default_rng(0)
    for version in range(1, SYNCS + 1):
        request = SampleRequest(prompt(policy, rng), words, rng)
        begin = time.perf_counter()
        sampler.sync(version)
        asyncio.run(sampler.sample(request))
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def main(words: list[str]) -> None:
    given = {"policy": "tiny", "samplers": "local,vllm", "counts": "1,16,64", "seconds": "10", "url": ""}
    given |= dict(word.split("=", 1) for word in words)
    urls = [url for url in given["url"].split(",") if url]
    policy = QwenVL.load(PolicyConfig(model=given["policy"], lora=LoraConfig(rank=16)))
    actions = ActionWords.build(["left", "right"], policy.processor.tokenizer)
    for name in given["samplers"].split(","):
        begin = time.perf_counter()
        sampler = make_sampler(name, policy, urls)
        sampler.sync(0)
        result: dict[str, Any] = {"sampler": name, "start_s": round(time.perf_counter() - begin, 1)}
        rate(sampler, policy, actions, 2, 1.0)  # the first requests compile and allocate
        result["sync_s"] = round(sync_seconds(sampler, policy, actions), 3)
        for count in map(int, given["counts"].split(",")):
            measured = rate(sampler, policy, actions, count, float(given["seconds"]))
            result[f"{count}"] = {key: round(value, 3) for key, value in measured.items()}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
