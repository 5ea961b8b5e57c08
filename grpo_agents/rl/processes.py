"""What the processes of one run tell each other, over accelerate; a run of one process has nobody to ask.

Each process plays its own groups. What is decided from play (restarts, advantages over a batch, when the run is over) is
decided from the play of all, and thus alike in all of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from numpy.typing import NDArray

from grpo_agents.config import GroupConfig
from grpo_agents.errors import ConfigError
from grpo_agents.rl.advantages import scale_by_std
from grpo_agents.rl.credit import Credit, assign_credit, comparable, outcomes, scale_of
from grpo_agents.rl.episode import Episode, Group, Step
from grpo_agents.rl.values import cross_fitted_values, explained_variance

T = TypeVar("T")
Observe = Callable[[Sequence[Step]], NDArray[np.floating]]
"""Gives what is seen at each step, (N, F)."""


def on_cpu(device: str | None) -> bool:
    """Whether a policy for that device (None: the best one) is computed on the CPU, which accelerate has to be told."""
    return device == "cpu" or (device is None and not torch.accelerator.is_available())


def join(device: str | None) -> PartialState:
    """Find the other processes of this run; the first thing that a process does with them.

    Args:
        device: of the policy; None for the best one.

    Raises:
        ConfigError: the launcher started several processes, and accelerate knows no way for them to talk.
    """
    state = PartialState(cpu=on_cpu(device))
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise ConfigError(
            [
                f"{started} processes were started, but on policy.device={device or state.device.type} each is alone; "
                "several can share a run on CUDA devices and, with policy.device=cpu, on CPUs"
            ]
        )
    return state


def everyone(own: T) -> list[T]:
    """The value of each process, in their order: the same list in all of them. Every process has to ask."""
    values: list[T] = gather_object([own])
    return values


def all_episodes(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes of all processes. With several, what their metrics do not need stays behind: prompts and tokens."""
    if PartialState().num_processes == 1:
        return list(episodes)
    return [episode for part in everyone([_outline(episode) for episode in episodes]) for episode in part]


def _outline(episode: Episode) -> Episode:
    blank: Any = None
    kept: dict[tuple[Any, ...], Step] = {}  # equal steps are one object, which is sent once

    def outline(step: Step) -> Step:
        key = step.reward, step.valid, step.sample.finish
        if key not in kept:
            sample = replace(step.sample, ids=blank, logprobs=blank, allowed=None, choice_probs=None, features=None)
            kept[key] = replace(step, encoded=blank, sample=sample)
        return kept[key]

    return replace(episode, steps=[outline(step) for step in episode.steps])


def credit_of_all(groups: Sequence[Group], config: GroupConfig, observe: Observe | None = None) -> Credit:
    """`assign_credit` to this process's groups, as if it were done to those of all processes together.

    Args:
        groups: this process's graded groups.
        config: how to compare them.
        observe: what is seen at each step, as float numbers (N, F); needed for the `gae` advantage, whose values are
            estimated from it and kept in the episodes.

    Returns:
        This process's steps; advantages are scaled by the batch of all processes where that is the scale, and counts of
        groups are those of all.
    """
    explained = None
    if config.advantage == "gae":
        assert observe is not None, "the gae advantage needs observations"
        explained = _estimate_values(groups, config, observe)
    scope = scale_of(config)
    if PartialState().num_processes == 1:
        return replace(assign_credit(groups, config), explained_variance=explained)
    own = assign_credit(groups, config.model_copy(update={"normalize": "none"}) if scope == "batch" else config)
    steps = own.steps
    if scope == "batch":
        raw = np.array([step.advantage for step in steps])
        scaled = scale_by_std(everyone(raw))[PartialState().process_index]
        steps = [replace(step, advantage=float(advantage)) for step, advantage in zip(steps, scaled, strict=True)]
    counts = everyone((own.flat, own.groups))
    flat = sum((flat for flat, _ in counts), Counter())
    return Credit(steps, flat, sum(number for _, number in counts), explained)


def _estimate_values(groups: Sequence[Group], config: GroupConfig, observe: Observe) -> float:
    """Set the values of all episodes that are compared, and say how much of their returns the values explain.

    A group is judged by the other groups of all processes. Where there is one group alone, an episode is judged by the
    other members.
    """
    compared = [comparable(group) for group in groups]
    episodes = [episode for members in compared for episode in members]
    steps = [step for episode in episodes for step in episode.steps]
    rank = PartialState().process_index
    labels = [
        (rank, g, m) for g, members in enumerate(compared) for m, episode in enumerate(members) for _ in episode.steps
    ]
    own = (
        observe(steps) if steps else None,
        np.concatenate([np.empty(0), *(outcomes(episode, config.gamma) for episode in episodes)]),
        np.array(labels, dtype=np.int64).reshape(-1, 3),
    )
    parts = [part for part in everyone(own) if part[0] is not None]
    if not parts:
        return float("nan")
    observations, returns, labelled = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    _, folds = np.unique(labelled[:, :2], axis=0, return_inverse=True)
    if not folds.any():  # one group
        folds = labelled[:, 2]
    values = cross_fitted_values(observations, returns, folds)
    mine = iter(values[labelled[:, 0] == rank])
    for episode in episodes:
        episode.values = np.fromiter(islice(mine, len(episode)), dtype=np.float64)
    return explained_variance(values, returns)
