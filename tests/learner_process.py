"""One of two processes that compare groups, and update one table policy, together; started by torchrun for
tests/test_two_processes.py.

Writes what it holds after each case of `CASES`, and what it knows of the groups of both, to a file named after its rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from table_policy import TablePolicy, make_learner, replies
from torch import Tensor, nn
from worlds import episode_of

from grpo_agents.config import GroupConfig, LossConfig
from grpo_agents.rl.credit import TrainingStep
from grpo_agents.rl.episode import EndReason, Episode, Group, Step
from grpo_agents.rl.losses import LOSSES
from grpo_agents.rl.processes import all_episodes, credit_of_all

STEPS = 12


@dataclass(frozen=True)
class Case:
    """An update on twelve steps, of which the first process has `first`.

    Attributes:
        settings: of the learner, its loss among them.
        change: what is done to the steps before.
        room: rows of a batch for which the second process has memory.
    """

    first: int = 7
    settings: dict[str, Any] | None = None
    change: Callable[[list[TrainingStep]], None] = lambda steps: None
    room: int = 1000


def too_good(steps: list[TrainingStep]) -> None:
    """The last step, which the second process has, makes its loss infinite."""
    steps[-1] = replace(steps[-1], advantage=np.inf)


def misrecorded(steps: list[TrainingStep]) -> None:
    """The last step's recorded log-probabilities are off by a half."""
    sample = steps[-1].sample
    steps[-1] = replace(steps[-1], sample=replace(sample, logprobs=sample.logprobs - np.float32(0.5)))


CASES = {
    **{
        name: Case(settings={"epochs": 3, "loss": LossConfig(name=name, beta=0.1, entropy=0.05)})  # type: ignore[arg-type]
        for name in LOSSES
    },
    "all steps in the first": Case(first=STEPS, settings={"epochs": 3}),
    "all steps in the second": Case(first=0, settings={"epochs": 3}),
    "out of memory in the second": Case(first=4, settings={"epochs": 3}, room=2),
    "not finite in the second": Case(change=too_good),
    "a wrong record in the second": Case(change=misrecorded),
    "minibatches": Case(settings={"minibatch": 5, "epochs": 2}),
    "fewer steps than all": Case(settings={"max_steps": 5, "minibatch": 2}),
    "a single step for both": Case(settings={"max_steps": 1}),
    "weight decay": Case(settings={"epochs": 3, "weight_decay": 0.5}),
}


class Limited(TablePolicy):
    """Has memory for so many rows of a batch, and a weight that no reply depends on."""

    room = 1000

    def __init__(self, logits: Tensor, dropout: float = 0.0):
        super().__init__(logits, dropout)
        self.idle = nn.Parameter(torch.ones(2))

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.idle, self.table]

    def forward(self, batch: Any, temperature: float = 1.0) -> Any:
        if len(batch.mask) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(batch, temperature)


def run(case: Case, rank: int | None) -> dict[str, Any]:
    """Make the update with a process's part of the steps, or with all of them where there is one process."""
    policy = Limited(TablePolicy.random(STEPS).start)
    steps = replies(policy, STEPS)
    case.change(steps)
    part = slice(None) if rank is None else (slice(None, case.first), slice(case.first, None))[rank]
    if rank == 1:
        Limited.room = case.room
    skipped: list[list[TrainingStep]] = []
    learner = make_learner(policy, on_skip=skipped.append, **(case.settings or {}))
    metrics = learner.update(steps[part], lr=0.05, rng=np.random.default_rng(rank or 0))
    Limited.room = 1000
    trained = sorted({context for batch in policy.trained for context in batch})
    return {
        "table": policy.table.detach(),
        "idle": policy.idle.tolist(),
        "metrics": metrics,
        "skipped": [sorted(int(step.encoded) for step in minibatch) for minibatch in skipped],  # type: ignore[call-overload]
        "trained": trained,
        "micro_batch": learner.micro_batch,
    }


COMPARISONS = {
    f"{advantage}, {scale}": GroupConfig(advantage=advantage, normalize=scale)  # type: ignore[arg-type]
    for advantage in ("gae", "return_to_go", "episode")
    for scale in ("batch", "group", "none")
}
COUNTS = (5, 1)
"""Numbers of groups, which the processes take in turn; a single one leaves the second process without any."""


def groups(count: int) -> list[Group]:
    """Groups of three episodes of different lengths; those of the second group are alike."""
    rng = np.random.default_rng(0)

    def episode(group: int) -> Episode:
        rewards = [1.0, 1.0] if group == 1 else rng.normal(size=rng.integers(1, 6)).tolist()
        return episode_of(rewards, EndReason.TERMINATED)

    return [Group([episode(group) for _ in range(3)]) for group in range(count)]


def seen(steps: Sequence[Step]) -> NDArray[np.float64]:
    """Two numbers that tell something of a step: its reward, and the square of it."""
    rewards = np.array([step.reward for step in steps])
    return np.stack([rewards, rewards**2], axis=1)


def compare(rank: int) -> dict[str, Any]:
    """Advantages, flat groups and number of groups for each comparison and count; the returns of all episodes."""
    known: dict[str, Any] = {}
    for name, config in COMPARISONS.items():
        for count in COUNTS:
            credit = credit_of_all(groups(count)[rank::2], config, seen)
            advantages = [step.advantage for step in credit.steps]
            known[f"{name}, {count}"] = advantages, dict(credit.flat), credit.groups
    own = [episode for group in groups(max(COUNTS))[rank::2] for episode in group.episodes]
    return known | {"returns": [episode.episode_return for episode in all_episodes(own)]}


if __name__ == "__main__":
    state = PartialState(cpu=True)
    results = {name: run(case, state.process_index) for name, case in CASES.items()}
    results["groups"] = compare(state.process_index)
    torch.save(results, Path(sys.argv[1]) / f"process_{state.process_index}.pt")
    state.destroy_process_group()
