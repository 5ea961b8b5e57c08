"""Checks between training settings that are each valid alone."""

from __future__ import annotations

import re

from grpo_agents.config import PolicyConfig, SamplerConfig, TrainConfig
from grpo_agents.run.settings import show

RESUME_KEYS = {"resume", "updates", "env_steps", "episodes"}
"""What may be set beside `resume`: the limits of a run. All else is read from the run's own config.yaml."""


def check_train(config: TrainConfig) -> list[str]:
    """One sentence for each problem between settings that are valid alone; settings stand under their dotted names."""
    problems = [
        *_check_group(config),
        *_check_learning(config),
        *_check_sampler(config.sampler, config.policy),
        *_check_names(config),
    ]
    if config.resume is not None:
        extra = sorted(config.model_fields_set - RESUME_KEYS)
        if extra:
            problems.append(
                f"resume={config.resume} goes on with the settings in that folder, so {', '.join(extra)} cannot be set "
                f"beside it; only {', '.join(sorted(RESUME_KEYS - {'resume'}))} can"
            )
    return problems


def _check_group(config: TrainConfig) -> list[str]:
    problems = []
    if config.group.size == 1:
        problems.append(
            "group.size=1: a group of one has nothing to compare its return with, so no advantage can be formed; "
            "set group.size to 2 or more (default 8)"
        )
    elif config.group.size < 1:
        problems.append(f"group.size={config.group.size}: must be a whole number from 2")
    least, most = config.group.restart.before
    if least > most:
        problems.append(f"group.restart.before=[{least},{most}]: least steps first, then most; write [{most},{least}]")
    crop = config.env.frames.crop
    if crop is not None and (crop[2] <= crop[0] or crop[3] <= crop[1]):
        problems.append(
            f"env.frames.crop={show(crop)}: left,top,right,bottom must have right above left and bottom above top"
        )
    actions = config.env.actions
    if actions is not None:
        if not actions or not all(word.strip() for word in actions):
            problems.append(f"env.actions={show(actions)}: give one word for each action, in the action space's order")
        twice = sorted({word for word in actions if actions.count(word) > 1})
        if twice:
            problems.append(f"env.actions={show(actions)}: {', '.join(twice)} stands twice; each needs its own word")
    return problems


def _check_learning(config: TrainConfig) -> list[str]:
    problems = []
    learner, loss = config.learner, config.loss
    if learner.micro_batch is not None and learner.micro_batch > learner.minibatch:
        problems.append(
            f"learner.micro_batch={learner.micro_batch} is larger than learner.minibatch={learner.minibatch}; "
            f"a minibatch is cut into micro-batches, so set learner.micro_batch to at most {learner.minibatch}"
        )
    if loss.clip_low is not None and loss.clip_low > 1:
        problems.append(
            f"loss.clip_low={loss.clip_low}: the ratio is clipped below at 1 - clip_low, which must not be negative; "
            "must be a number above 0 up to 1"
        )
    if not config.rewards:
        problems.append("rewards=[]: give at least one reward; the default is [return]")
    names = [reward.name for reward in config.rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        problems.append(f"rewards: {', '.join(twice)} is listed twice; give it once, with the sum of the weights")
    return problems


def _check_sampler(sampler: SamplerConfig, policy: PolicyConfig) -> list[str]:
    """Problems between a sampler's settings and those of the policy it samples from."""
    problems = []
    if sampler.name == "vllm-server" and not sampler.url:
        problems.append("sampler=vllm-server needs the servers' addresses: set sampler.url=http://localhost:8000")
    if sampler.name != "vllm-server" and sampler.url:
        problems.append(
            f"sampler.url={show(sampler.url)} has no effect with sampler={sampler.name}; set sampler=vllm-server"
        )
    if sampler.name == "vllm-server" and (not policy.lora.rank or policy.vision == "trained"):
        problems.append(
            "sampler=vllm-server hands the language model's LoRA adapter to its servers, not all weights "
            "(policy.lora.rank=0) nor a trained vision tower (policy.vision=trained); set sampler=vllm"
        )
    return problems


def _check_names(config: TrainConfig) -> list[str]:
    problems = []
    name = config.name
    if name is not None and (name != name.strip() or name in ("", ".", "..") or re.search(r"[/\\\0]", name)):
        problems.append(f"name={name!r}: must be a folder's name under runs/, without slashes or blanks at its ends")
    if not config.env.id.strip():
        problems.append("env.id is empty: give a Gymnasium id, such as env.id=CartPole-v1")
    return problems
