"""An agent: a policy, its sampler and its environments put together. The doors build one and play with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from grpo_agents.config import EnvConfig, PolicyConfig, SamplerConfig
from grpo_agents.envs import snapshot
from grpo_agents.envs.prompt_env import PromptEnv, make_env
from grpo_agents.errors import GrpoAgentsError, SnapshotError
from grpo_agents.policies.action_words import ActionWords
from grpo_agents.policies.canary import Canary
from grpo_agents.policies.local import LocalSampler
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import Sampler, SampleRequest
from grpo_agents.policies.sequences import TokenBatch, TokenSequence, collate
from grpo_agents.rl.credit import TrainingStep
from grpo_agents.rl.episode import Encoded, EndReason, Episode, Sample, Step
from grpo_agents.rl.rollout import Play, Rollouts
from grpo_agents.rl.starts import Start

_TINY = 10_000_000


@dataclass(eq=False)
class Agent:
    """Use `Agent.build`.

    Attributes:
        policy: the model that plays and learns.
        sampler: what draws its replies.
        words: the action words as token tries.
        play: the parts that rollouts need.
        canary: tells whether sampler and learner have the same weights.
        reward_threshold: return at which the environment counts as solved; None where its spec has none.
    """

    env: EnvConfig
    policy: QwenVL
    sampler: Sampler
    words: ActionWords
    play: Play
    canary: Canary
    reward_threshold: float | None

    @classmethod
    def build(
        cls,
        env: EnvConfig,
        policy: PolicyConfig,
        sampler: SamplerConfig,
        *,
        seed: int = 0,
        adapter: Path | None = None,
        snapshots: bool | None = False,
    ) -> Agent:
        """Make one environment to look at, load the policy, and put them together.

        Args:
            env, policy, sampler: settings.
            seed: of a new adapter.
            adapter: a saved one to load instead.
            snapshots: whether environments will be saved and restored; proved to be exact first. None: if they can be.

        Raises:
            GrpoAgentsError: the environment cannot be made or saved, or the model cannot be loaded.
        """
        example: PromptEnv[Any] = make_env(env)
        threshold = example.spec.reward_threshold if example.spec else None
        if snapshots is not False:
            try:
                snapshot.verify(lambda: make_env(env))
                snapshots = True
            except SnapshotError as error:
                if snapshots:
                    raise SnapshotError(f"group.start=restart needs to save and restore {env.id}: {error}") from error
        loaded = QwenVL.load(policy, seed=seed, adapter=adapter)
        _set_threads(policy.threads, loaded)
        words = ActionWords.build(example.actions, loaded.processor.tokenizer)
        chosen = _make_sampler(loaded, sampler)
        chosen.sync(loaded.version)

        async def draw(encoded: Encoded, rng: np.random.Generator | None) -> Sample:
            request = SampleRequest(encoded, words, rng, sampler.temperature, sampler.max_new_tokens)
            return await chosen.sample(request)

        spare = [example]
        play = Play(
            make_env=lambda: spare.pop() if spare else make_env(env),
            encode=loaded.encode,
            draw=draw,
            snapshots=snapshot if snapshots else None,
        )
        canary = Canary(loaded, words, sampler.temperature, sampler.canary)
        return cls(env, loaded, chosen, words, play, canary, threshold)

    def collate(self, steps: Sequence[TrainingStep]) -> TokenBatch:
        """Training steps as one batch of the policy. Features kept from play serve while the vision tower is frozen."""
        sequences = [TokenSequence.of_sample(step.encoded, step.sample) for step in steps]
        return collate(sequences, self.policy.pad_id, self.policy.device)

    def observe(self, steps: Sequence[Step]) -> NDArray[np.float32]:
        """What the vision tower sees at each step, (N, F): see `QwenVL.observations`."""
        return self.policy.observations([s.encoded for s in steps], [s.sample.features for s in steps])

    def greedy_episodes(self, rollouts: Rollouts, seeds: Sequence[int], at_once: int = 64) -> list[Episode]:
        """One greedy episode from the reset of each seed.

        Raises:
            GrpoAgentsError: an environment failed; an evaluation with holes is none.
        """
        episodes: list[Episode] = []
        for begin in range(0, len(seeds), at_once):
            part = seeds[begin : begin + at_once]
            episodes += [episode for episode, _ in rollouts.episodes([Start(s) for s in part], [None] * len(part))]
        for episode in episodes:
            if episode.end is EndReason.FAULT:
                raise GrpoAgentsError(f"{self.env.id} failed in evaluation, seed {episode.seed}:\n{episode.fault}")
        return episodes


def _set_threads(threads: int | None, policy: QwenVL) -> None:
    """Choose the number of CPU threads.

    The operations of a tiny model are too small to share: two threads gain little on an idle machine, wait for each other
    many times longer than they compute on a busy one, and round differently on machines with other numbers of cores.
    """
    if threads is None and sum(p.numel() for p in policy.core.parameters()) < _TINY:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def _make_sampler(policy: QwenVL, config: SamplerConfig) -> Sampler:
    if config.name == "vllm":
        from grpo_agents.policies.vllm_engine import VllmSampler

        return VllmSampler(policy, config)
    if config.name == "vllm-server":
        from grpo_agents.policies.vllm_server import VllmServerSampler

        return VllmServerSampler(policy, config)
    return LocalSampler(policy, config.batch_size)


def random_returns(env: EnvConfig, seeds: Sequence[int], rng: np.random.Generator) -> list[float]:
    """Return of one episode of uniformly random actions from each seed. Nothing is rendered."""
    plain = gym.make(env.id, **env.kwargs)
    returns = []
    for seed in seeds:
        plain.reset(seed=int(seed))
        total, over = 0.0, False
        while not over:
            space: Any = plain.action_space
            _, reward, terminated, truncated, _ = plain.step(int(space.start) + int(rng.integers(space.n)))
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    plain.close()
    return returns
