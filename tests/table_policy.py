"""A policy whose logits stand in a table, for tests of the learner that need no network: its answers are known by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from grpo_agents.config import LearnerConfig, LossConfig
from grpo_agents.rl.credit import TrainingStep
from grpo_agents.rl.episode import Sample
from grpo_agents.rl.learner import Learner

LENGTH, VOCABULARY = 5, 7
MAX_TOKENS = 8
Allowed = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Decisions of B replies: contexts (B,); positions, targets and mask (B, C); options, bool (B, C, V)."""

    contexts: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor
    options: Tensor


class TablePolicy(nn.Module):
    """Logits (contexts, LENGTH, VOCABULARY) are the trained weights. A step's prompt is the number of its context."""

    def __init__(self, logits: Tensor, dropout: float = 0.0):
        super().__init__()
        self.table = nn.Parameter(logits.clone())
        self.start = logits.clone()
        self.dropout = nn.Dropout(dropout)
        self.config = SimpleNamespace(lora=SimpleNamespace(dropout=dropout))
        self.trained: list[list[int]] = []  # contexts of each batch that was seen with a gradient
        self._referring = False
        self.eval()

    @classmethod
    def random(cls, contexts: int, seed: int = 0, dropout: float = 0.0) -> TablePolicy:
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(contexts, LENGTH, VOCABULARY, generator=generator), dropout)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.table]

    @contextmanager
    def reference(self) -> Iterator[None]:
        self._referring = True
        yield
        self._referring = False

    def forward(self, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            self.trained.append(batch.contexts.tolist())
        logits = (
            self.dropout(self.start if self._referring else self.table)[batch.contexts[:, None], batch.positions]
            / temperature
        )
        log_all = logits.masked_fill(~batch.options, -1e9).log_softmax(-1)
        logprobs = log_all.gather(-1, batch.targets[..., None])[..., 0]
        entropies = -(log_all.exp() * log_all).sum(-1)
        return logprobs.masked_fill(~batch.mask, 0.0), entropies.masked_fill(~batch.mask, 0.0)


def collate(steps: Sequence[TrainingStep]) -> Batch:
    shape = len(steps), max(len(step.sample.decisions) for step in steps)
    positions, targets = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    mask, options = np.zeros(shape, dtype=bool), np.ones((*shape, VOCABULARY), dtype=bool)
    for row, sample in enumerate(step.sample for step in steps):
        for column, token in enumerate(sample.decisions):
            positions[row, column], targets[row, column], mask[row, column] = token, sample.ids[token], True
            if sample.allowed is not None:
                options[row, column] = np.isin(np.arange(VOCABULARY), sample.allowed[token])
    contexts: Any = [step.encoded for step in steps]
    return Batch(torch.tensor(contexts), *map(torch.from_numpy, (positions, targets, mask, options)))


def step(context: int, ids: Sequence[int], advantage: float, allowed: Allowed | None = None) -> TrainingStep:
    """A reply in a context, its log-probabilities not yet known."""
    sample = Sample(
        ids=np.array(ids),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        allowed=allowed,
        choice=None,
        choice_probs=None,
        policy_version=0,
        temperature=1.0,
        greedy=False,
        finish="stop",
    )
    prompt: Any = context
    return TrainingStep(prompt, sample, advantage)


def recorded(policy: TablePolicy, steps: Sequence[TrainingStep]) -> list[TrainingStep]:
    """The steps with the log-probabilities that the policy, as it is, gives their replies."""
    with torch.no_grad():
        rows = [policy(collate([step]))[0][0].numpy() for step in steps]
    out = []
    for step, row in zip(steps, rows, strict=True):
        logprobs = np.zeros(len(step.sample.ids), dtype=np.float32)
        logprobs[step.sample.decisions] = row
        out.append(replace(step, sample=replace(step.sample, logprobs=logprobs)))
    return out


def replies(policy: TablePolicy, count: int, seed: int = 0) -> list[TrainingStep]:
    """Free replies of all lengths, one in each of the first contexts, as the policy would record them."""
    rng = np.random.default_rng(seed)
    return recorded(
        policy,
        [
            step(context, rng.integers(VOCABULARY, size=rng.integers(1, LENGTH + 1)).tolist(), float(rng.normal()))
            for context in range(count)
        ],
    )


def make_learner(
    policy: Any,
    *,
    loss: LossConfig | None = None,
    collate: Callable[[Sequence[TrainingStep]], Any] = collate,
    on_skip: Callable[[list[TrainingStep]], None] | None = None,
    **settings: Any,
) -> Learner:
    """A learner with settings of `LearnerConfig`. It has no entropy bonus if nothing is said of its loss."""

    def unexpected(steps: list[TrainingStep]) -> None:
        raise AssertionError(f"a minibatch of {len(steps)} steps was skipped")

    config = LearnerConfig(**{"max_grad_norm": 1e9, **settings})
    return Learner(
        policy,
        collate,
        loss or LossConfig(entropy=0.0),
        config,
        Accelerator(cpu=True),
        max_tokens=MAX_TOKENS,
        on_skip=on_skip or unexpected,
    )


def gradient(learner: Learner, steps: Sequence[TrainingStep]) -> tuple[Tensor, dict[str, float]]:
    """The gradient of an update that changes no weight, all parameters in one row, and the update's metrics."""
    seen: list[Tensor] = []

    def keep(*_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten() for p in learner.policy.trainable_parameters()]))

    hook = learner.optimizer.optimizer.register_step_pre_hook(keep)
    metrics = learner.update(steps, lr=0.0, rng=np.random.default_rng(0))
    hook.remove()
    assert len(seen) == 1
    return seen[0], metrics
