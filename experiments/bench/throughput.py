"""Sampling against the bare forward pass: `python experiments/bench/throughput.py output=throughput.json`.

Three ways to get one action word for each of B prompts whose frames were never seen before, measured in turn within one
process, medians over the repeats:

- sampler: `LocalSampler` with B requests waiting, from raw frames to drawn replies with their probabilities;
- bare: one forward of the transformers model on ready-made inputs (input_ids, pixel_values_videos and so on, the form that
  a processor returns), with M-RoPE positions given, without choosing anything;
- minimal: the same numbers by the project's own vision and language passes on a ready-made batch, without choosing.

Inputs are made outside the clock for bare and minimal. For the sampler, hashing frames, cutting them into patches,
collating and drawing are inside it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from grpo_agents.agent import Agent
from grpo_agents.config import EnvConfig, PolicyConfig, SamplerConfig, Section
from grpo_agents.envs import make_env
from grpo_agents.policies.local import collate_prompts
from grpo_agents.policies.qwen_vl import PrefixCache, QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.policies.sequences import TokenBatch, TokenSequence
from grpo_agents.rl.episode import Encoded, Prompt, VideoPart
from grpo_agents.run.command import run_command
from grpo_agents.run.config import parse
from grpo_agents.run.provenance import hardware, versions

WARM_UP = 3


class ThroughputConfig(Section):
    """All settings of this script."""

    output: str = Field(description="JSON file to write")
    repeats: PositiveInt = Field(25, description="measurements of each way at each batch size")
    waiting: list[PositiveInt] = Field(default_factory=lambda: [1, 8, 64], description="batch sizes")


def distinct_prompts(config: EnvConfig, count: int) -> Iterator[Prompt]:
    """Prompts of random play, no two with equal frames, and none hashed before."""
    rng = np.random.default_rng(0)
    seen: set[bytes] = set()
    seed, over = 0, True
    with closing(make_env(config)) as env:
        while len(seen) < count:
            if over:
                seed += 1
                prompt, _ = env.reset(seed=seed)
                over = False
            else:
                prompt, _, terminated, truncated, _ = env.step(int(rng.integers(len(env.actions))))
                over = terminated or truncated
            (video,) = prompt.visuals()
            assert isinstance(video, VideoPart)
            pixels = b"".join(frame.pixels.tobytes() for frame in video.frames)
            if pixels not in seen:
                seen.add(pixels)
                yield prompt


def bare_inputs(policy: QwenVL, prompts: Sequence[Encoded]) -> dict[str, Tensor]:
    """What the transformers model takes for prompts of one layout with one video each."""
    rows, layout = len(prompts), prompts[0].layout
    encode = policy.encode
    grid = (1, *layout.spans[0].grid[1:])
    patches = encode.patches([prompt.visuals[0] for prompt in prompts]).flatten(0, 1)
    ids = torch.from_numpy(layout.ids).expand(rows, -1)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.from_numpy(layout.position_ids)[:, None].expand(-1, rows, -1),
        "mm_token_type_ids": 2 * (ids == encode.video_token_id).int(),
        "pixel_values_videos": patches,
        "video_grid_thw": torch.tensor([(len(layout.spans) * grid[0], *grid[1:])]).expand(rows, -1),
    }
    return {name: tensor.to(policy.device) for name, tensor in inputs.items()}


@torch.no_grad()
def bare_logits(policy: QwenVL, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of the reply's first token by a plain forward of the whole prompt, (B, vocabulary)."""
    logits: Tensor = policy.core(**inputs, use_cache=False).logits[:, -1]
    return logits


def minimal_batch(policy: QwenVL, prompts: Sequence[Encoded]) -> TokenBatch:
    """The prompts as a batch, pixels not yet encoded."""
    unknown = np.array([policy.pad_id], dtype=np.int64)
    sequences = [TokenSequence(prompt, unknown, [len(prompt.layout.ids)]) for prompt in prompts]
    return collate_prompts(sequences, policy)


@torch.no_grad()
def minimal_logits(policy: QwenVL, batch: TokenBatch, prefix: PrefixCache | None) -> Tensor:
    """The same logits by the project's own passes, the prefix known."""
    hidden, _ = policy.hidden(batch, prefix)
    logits: Tensor = policy.core.lm_head(hidden[:, -1])
    return logits


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


async def measure(agent: Agent, waiting: Sequence[int], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each way, by batch size and way, a list of `repeats`. The order of the ways turns with each repeat."""
    policy, sampler = agent.policy, agent.sampler
    rng = np.random.default_rng(0)
    fresh = distinct_prompts(agent.env, (repeats + WARM_UP) * sum(waiting))
    times: dict[str, dict[str, list[float]]] = {
        str(rows): {"sampler": [], "bare": [], "minimal": []} for rows in waiting
    }
    for repeat in range(-WARM_UP, repeats):
        for rows in waiting:
            prompts = [policy.encode(next(fresh)) for _ in range(rows)]
            inputs, batch = bare_inputs(policy, prompts), minimal_batch(policy, prompts)
            with torch.no_grad():
                prefix = policy.prefix_cache(batch)
            requests = [SampleRequest(prompt, agent.words, rng) for prompt in prompts]
            took = {}
            for turn in range(3):
                way = ("sampler", "bare", "minimal")[(repeat + turn) % 3]
                if way == "sampler":
                    begin = time.perf_counter()
                    await asyncio.gather(*(sampler.sample(request) for request in requests))
                    took[way] = time.perf_counter() - begin
                elif way == "bare":
                    took[way] = seconds(lambda inputs=inputs: bare_logits(policy, inputs))  # type: ignore[misc]
                else:
                    took[way] = seconds(
                        lambda batch=batch, prefix=prefix: minimal_logits(policy, batch, prefix)  # type: ignore[misc]
                    )
            if repeat >= 0:
                for way, value in took.items():
                    times[str(rows)][way].append(value)
    return times


def table(times: dict[str, dict[str, list[float]]]) -> list[dict[str, float]]:
    """One row for each batch size: samples a second of each way, and the sampler's share of the other two."""
    rows = []
    for waiting, ways in times.items():
        rate = {way: int(waiting) / statistics.median(values) for way, values in ways.items()}
        rows.append(
            {
                "waiting": int(waiting),
                **{f"{way}_per_s": value for way, value in rate.items()},
                "of_bare": rate["sampler"] / rate["bare"],
                "of_minimal": rate["sampler"] / rate["minimal"],
            }
        )
    return rows


def run(config: ThroughputConfig) -> dict[str, Any]:
    """Measure with the default policy on CartPole-v1."""
    agent = Agent.build(EnvConfig(), PolicyConfig(), SamplerConfig())
    times = asyncio.run(measure(agent, config.waiting, config.repeats))
    return {"rows": table(times), "repeats": config.repeats, "versions": versions(), "hardware": hardware()}


def main(argv: list[str]) -> None:
    config = parse(ThroughputConfig, argv, prog="python experiments/bench/throughput.py", summary=__doc__ or "")
    Path(config.output).write_text(json.dumps(run(config)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command(main))
