"""One update: from training steps to new weights.

Written on accelerate: with several processes each holds its own steps, counts are summed and gradients averaged, so that
the result is that of one process with all steps. Results do not depend on the micro-batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_agents.config import LearnerConfig, LossConfig
from grpo_agents.rl.credit import TrainingStep
from grpo_agents.rl.losses import (
    DEFAULT_CLIP,
    LOSSES,
    Denominators,
    RatioStatistics,
    aggregate,
    k3_kl,
    ratio_statistics,
)

_KL_STEPS = 256
"""Steps on which the KL is measured in an update that has no KL term in its loss."""


@dataclass
class _Totals:
    """Sums over an update's optimizer steps."""

    loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    grad_norm: float = 0.0
    optimizer_steps: int = 0
    skipped: int = 0
    ratios: RatioStatistics = field(default_factory=RatioStatistics)


class Learner:
    """Trains a policy on the steps of an update.

    Args:
        policy: module whose call on a batch gives log-probabilities and entropies, both (B, C); its `reference()` context
            is the model before training.
        collate: puts training steps into the policy's batch; the batch has `mask`, bool (B, C).
        loss, config: settings.
        accelerator: accelerate's, which holds device and processes.
        max_tokens: the longest reply, which dr_grpo divides by.
        on_skip: called with the steps of a minibatch that was skipped because its gradient was not finite.
    """

    def __init__(
        self,
        policy: Any,
        collate: Callable[[Sequence[TrainingStep]], Any],
        loss: LossConfig,
        config: LearnerConfig,
        accelerator: Any,
        *,
        max_tokens: int,
        on_skip: Callable[[list[TrainingStep]], None],
    ):
        self.policy = policy
        self.collate = collate
        self.loss = loss
        self.config = config
        self.accelerator = accelerator
        self.max_tokens = max_tokens
        self.on_skip = on_skip
        low, high = DEFAULT_CLIP[loss.name]
        self.clip_low = low if loss.clip_low is None else loss.clip_low
        self.clip_high = high if loss.clip_high is None else loss.clip_high
        optimizer = torch.optim.AdamW(
            policy.trainable_parameters(), lr=config.lr, weight_decay=config.weight_decay, foreach=True
        )
        self.module, self.optimizer = accelerator.prepare(policy, optimizer)
        self.micro_batch = config.micro_batch or config.minibatch

    def update(self, steps: Sequence[TrainingStep], lr: float, rng: np.random.Generator) -> dict[str, float]:
        """Train on the steps (at most `max_steps` of them, drawn by `rng`) and say how it went.

        Args:
            steps: this process's steps.
            lr: learning rate of this update.
            rng: the update's own stream; also seeds dropout.

        Returns:
            Metrics of the update: loss, entropy, kl, clip fraction, ratios, gradient norm.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.policy.train(self.policy.config.lora.dropout > 0)
        totals = _Totals()
        order = rng.permutation(len(steps))[: self.config.max_steps // self.accelerator.num_processes or 1]
        used = [steps[i] for i in order]
        metrics: dict[str, float] = {"mismatch": self._mismatch(used[: self.micro_batch]) if used else 0.0}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**31)))
            for _ in range(self.config.epochs):
                shuffled = [used[i] for i in rng.permutation(len(used))]
                for minibatch in self._minibatches(shuffled):
                    self._optimizer_step(minibatch, totals)
        self.policy.eval()
        count = max(totals.optimizer_steps, 1)
        metrics |= {
            "loss": totals.loss / count,
            "entropy": totals.entropy / count,
            "kl": totals.kl / count if self.loss.beta else self._kl(used[:_KL_STEPS]),
            "clip_fraction": totals.ratios.clip_fraction,
            "ratio/mean": totals.ratios.ratio_mean,
            "ratio/max": totals.ratios.ratio_max,
            "ratio/ess": totals.ratios.effective_sample_size,
            "grad_norm": totals.grad_norm / count,
            "lr": lr,
            "optimizer_steps": totals.optimizer_steps,
            "skipped": totals.skipped,
            "trained_steps": float(self._sum(len(used))),
        }
        return metrics

    def _minibatches(self, steps: list[TrainingStep]) -> list[list[TrainingStep]]:
        """This process's parts of the minibatches. All processes get equally many parts of equal size: a process with
        fewer steps repeats some without weight, since every process has to take part in every gradient average."""
        share = max(1, self.config.minibatch // self.accelerator.num_processes)
        most = int(self._max(len(steps)))
        if not most:
            return []
        if len(steps) < most:
            filler = steps or [self._blank]
            dead = [TrainingStep(s.encoded, s.sample, 0.0, live=False) for s in filler]
            steps = steps + [dead[i % len(dead)] for i in range(most - len(steps))]
        return [steps[start : start + share] for start in range(0, most, share)]

    @property
    def _blank(self) -> TrainingStep:
        raise RuntimeError("this process has played no step at all; give each process at least one group (group.count)")

    def _optimizer_step(self, minibatch: list[TrainingStep], totals: _Totals) -> None:
        """One optimizer step. Out of memory: the micro-batch is halved and the step repeated, with the same result."""
        while True:
            try:
                part = self._accumulate(minibatch)
                break
            except RuntimeError as error:
                if not _is_out_of_memory(error) or self.micro_batch == 1:
                    raise
                self.micro_batch = max(1, min(self.micro_batch, len(minibatch)) // 2)
            # Outside the handler, where the failed step's tensors are no longer held by the traceback.
            self.optimizer.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        parameters = self.policy.trainable_parameters()
        norm = float(self.accelerator.clip_grad_norm_(parameters, self.config.max_grad_norm))
        if not math.isfinite(norm) or not math.isfinite(part.loss):
            self.optimizer.zero_grad(set_to_none=True)
            totals.skipped += 1
            self.on_skip(minibatch)
            return
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        totals.loss += part.loss
        totals.entropy += part.entropy
        totals.kl += part.kl
        totals.grad_norm += norm
        totals.optimizer_steps += 1
        totals.ratios = totals.ratios + part.ratios

    def _accumulate(self, minibatch: list[TrainingStep]) -> _Totals:
        """Gradients of a whole minibatch, micro-batch by micro-batch."""
        live = [step for step in minibatch if step.live]
        denominators = Denominators(
            sequences=self._sum(len(live)),
            tokens=self._sum(sum(len(step.sample.decisions) for step in live)),
            max_tokens=float(self.max_tokens),
        )
        part = _Totals()
        chunks = [minibatch[i : i + self.micro_batch] for i in range(0, len(minibatch), self.micro_batch)]
        for i, chunk in enumerate(chunks):
            last = i == len(chunks) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                loss, sums = self._micro_batch(chunk, denominators)
                # Processes average their gradients; the denominators are already those of all of them.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            part.loss += float(loss.detach())
            part.entropy += sums["entropy"]
            part.kl += sums["kl"]
            part.ratios = part.ratios + sums["ratios"]
        return part

    def _micro_batch(self, chunk: list[TrainingStep], denominators: Denominators) -> tuple[Tensor, dict[str, Any]]:
        batch = self.collate(chunk)
        device = batch.mask.device
        mask = batch.mask & torch.tensor([step.live for step in chunk], device=device)[:, None]
        old = _old_logprobs(chunk, mask.shape[1]).to(device)
        advantages = torch.tensor([step.advantage for step in chunk], dtype=torch.float32, device=device)
        temperature = chunk[0].sample.temperature
        logprobs, entropies = self.module(batch, temperature)
        name = self.loss.name
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss = LOSSES[name](logprobs, old, advantages, mask, denominators=denominators, **clip)
        entropy = aggregate(name, entropies, mask, denominators)
        loss = loss - self.loss.entropy * entropy
        kl = 0.0
        if self.loss.beta:
            with torch.no_grad(), self.policy.reference():
                reference, _ = self.policy(batch, temperature)
            divergence = aggregate(name, k3_kl(logprobs, reference), mask, denominators)
            loss = loss + self.loss.beta * divergence
            kl = float(divergence.detach())
        ratios = ratio_statistics(logprobs.detach(), old, mask, advantages, name=name, **clip)
        return loss, {"entropy": float(entropy.detach()), "kl": kl, "ratios": ratios}

    @torch.no_grad()
    def _mismatch(self, steps: list[TrainingStep]) -> float:
        """Largest difference between the sampler's and the learner's log-probabilities before the update."""
        batch = self.collate(steps)
        logprobs, _ = self.policy(batch, steps[0].sample.temperature)
        old = _old_logprobs(steps, batch.mask.shape[1]).to(logprobs.device)
        return float(((logprobs - old) * batch.mask).abs().max())

    @torch.no_grad()
    def _kl(self, steps: list[TrainingStep]) -> float:
        """k3 estimate of the KL to the model before training, after the update, on a sample of its steps."""
        if not steps:
            return 0.0
        total, tokens = 0.0, 0
        for start in range(0, len(steps), self.micro_batch):
            chunk = steps[start : start + self.micro_batch]
            batch = self.collate(chunk)
            logprobs, _ = self.policy(batch, chunk[0].sample.temperature)
            with self.policy.reference():
                reference, _ = self.policy(batch, chunk[0].sample.temperature)
            total += float((k3_kl(logprobs, reference) * batch.mask).sum())
            tokens += int(batch.mask.sum())
        return total / max(tokens, 1)

    def _sum(self, value: float) -> float:
        return self._reduce(value, "sum")

    def _max(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        gathered = self.accelerator.gather(torch.tensor([value], device=self.accelerator.device))
        return float(gathered.max())

    def _reduce(self, value: float, how: str) -> float:
        if self.accelerator.num_processes == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.reduce(tensor, reduction=how))


def learning_rate(config: LearnerConfig, update: int, progress: float) -> float:
    """Learning rate of an update.

    Args:
        config: peak, warm-up and schedule.
        update: number of updates made before.
        progress: share of the run's environment steps played, 0 to 1. It does not depend on `updates`, so a run that is
            stopped early and resumed follows the same schedule as one that was not.
    """
    progress = min(max(progress, 0.0), 1.0)
    fall = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    warm = min(1.0, (update + 1) / (config.warmup + 1))
    return config.lr * warm * fall


def _old_logprobs(steps: Sequence[TrainingStep], width: int) -> Tensor:
    """Log-probabilities of the decisions when they were sampled, (B, width), padded with 0."""
    out = torch.zeros(len(steps), width)
    for row, step in enumerate(steps):
        out[row, : len(step.sample.decisions)] = torch.from_numpy(step.sample.logprobs[step.sample.decisions])
    return out


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
