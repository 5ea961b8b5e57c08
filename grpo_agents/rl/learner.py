"""One update: from training steps to new weights.

Results do not depend on the micro-batch size (but for dropout, whose masks are drawn anew for each micro-batch), nor on
the number of processes: each holds its own steps, and counts, losses and gradients are added over all, so that an
optimizer step is the one that a single process would make with the steps of all.

Gradients are added once a process is through with its part of a minibatch, not while it goes backward as in
DistributedDataParallel: a process that runs out of memory can then repeat its part while the others wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import DistributedType
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_agents.config import LearnerConfig, LossConfig
from grpo_agents.errors import ConfigError
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
from grpo_agents.rl.mismatch import Mismatch, mismatch_statistics, mismatch_weights

T = TypeVar("T")

_KL_STEPS = 256
"""Steps on which the KL is measured in an update that has no KL term in its loss, over all processes."""
_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


@dataclass
class _Totals:
    """Sums over an update: of losses and gradient norms by optimizer step, of entropy, KL and ratios by token."""

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
        on_skip: called with this process's steps of a minibatch that was skipped because its loss or gradient was not
            finite.

    Raises:
        ConfigError: accelerate was told to shard the model (FSDP, DeepSpeed, Megatron).
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
        if accelerator.distributed_type in _SHARDED:
            raise ConfigError(
                [
                    f"accelerate was set up for {accelerator.distributed_type.value}, which shards the model, while every "
                    "process here plays with a whole one; choose plain multi-GPU in `accelerate config`, or use torchrun"
                ]
            )
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
        self.mismatch: Mismatch = loss.mismatch or "none"
        self.optimizer = accelerator.prepare(
            torch.optim.AdamW(
                policy.trainable_parameters(), lr=config.lr, weight_decay=config.weight_decay, foreach=True
            )
        )
        self.micro_batch = config.micro_batch or config.minibatch

    def update(self, steps: Sequence[TrainingStep], lr: float, rng: np.random.Generator) -> dict[str, float]:
        """Train on the steps (at most `max_steps` of them, drawn by `rng`) and say how it went.

        Args:
            steps: this process's steps. Those without a decision have nothing to learn and are left out.
            lr: learning rate of this update.
            rng: the update's own stream; also seeds dropout.

        Returns:
            Metrics of the update over all processes. `loss` and `grad_norm` (before clipping) are means over optimizer
            steps; `entropy`, `clip_fraction` and the ratios are over the decisions trained on, whatever the loss divides
            by; `kl` is the k3 estimate a decision, during the update where it is part of the loss, else after it, on a
            sample of the steps. `mismatch` is the largest difference between the log-probabilities that the sampler gave
            and the learner's own before the update, on a minibatch, or on all steps where `loss.mismatch` corrects for it;
            mismatch/mean, /max, /ess and /cut are of the ratios: mean, largest, effective sample size and the share above
            the cap. NaN where nothing was trained.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        steps = [step for step in steps if len(step.sample.decisions)]
        used = [steps[i] for i in rng.permutation(len(steps))[: self._share(len(steps), self.config.max_steps)]]
        size = int(self._sum([len(used)])[0])
        if self.mismatch == "none":
            mismatch = self._mismatch(self._judged(used[: self._share(len(used), self.config.minibatch)]))
        else:
            used = self._judged(used)
            mismatch = self._mismatch(used)
        totals = _Totals()
        self.policy.train(self.policy.config.lora.dropout > 0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**31)))
            for _ in range(self.config.epochs):
                shuffled = [used[i] for i in rng.permutation(len(used))]
                for minibatch in self._minibatches(shuffled, size):
                    self._optimizer_step(minibatch, totals)
        self.policy.eval()
        ratios = totals.ratios = self._all_ratios(totals.ratios)
        entropy, kl = self._sum([totals.entropy, totals.kl])
        return {
            **mismatch,
            "loss": _mean(totals.loss, totals.optimizer_steps),
            "entropy": _mean(entropy, ratios.tokens),
            "kl": _mean(kl, ratios.tokens) if self.loss.beta else self._kl(used[: self._share(len(used), _KL_STEPS)]),
            "clip_fraction": ratios.clip_fraction,
            "ratio/mean": ratios.ratio_mean,
            "ratio/max": ratios.ratio_max if ratios.tokens else math.nan,
            "ratio/ess": ratios.effective_sample_size,
            "grad_norm": _mean(totals.grad_norm, totals.optimizer_steps),
            "lr": lr,
            "optimizer_steps": totals.optimizer_steps,
            "skipped": totals.skipped,
            "trained_steps": float(size),
        }

    def _share(self, own: int, most: int) -> int:
        """How many of this process's `own` steps are taken when all processes together take at most `most`: the same share
        of each one's, but for rounding."""
        owns = [int(each) for each in self._each(own)]
        before, total = sum(owns[: self.accelerator.process_index]), sum(owns)
        return own if total <= most else (before + own) * most // total - before * most // total

    def _minibatches(self, steps: list[TrainingStep], size: int) -> list[list[TrainingStep]]:
        """This process's parts of the minibatches of all `size` steps, in proportion to what it has of them; all
        processes get equally many, some perhaps empty."""
        most = self.config.minibatch
        bounds = [min(len(steps), i * most * len(steps) // max(size, 1)) for i in range(math.ceil(size / most) + 1)]
        return [steps[start:end] for start, end in pairwise(bounds)]

    def _optimizer_step(self, minibatch: list[TrainingStep], totals: _Totals) -> None:
        """One optimizer step, unless its loss or gradient is not finite."""
        sequences, tokens = self._sum([len(minibatch), sum(len(step.sample.decisions) for step in minibatch)])
        if not sequences:
            return
        denominators = Denominators(sequences, tokens, float(self.max_tokens))
        part = self._fitting(len(minibatch), lambda: self._accumulate(minibatch, denominators))
        self._add_gradients()
        loss = self._sum([part.loss])[0]  # of all processes, so that all of them skip, or none
        norm = float(self.accelerator.clip_grad_norm_(self.policy.trainable_parameters(), self.config.max_grad_norm))
        if not math.isfinite(norm) or not math.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            totals.skipped += 1
            if minibatch:
                self.on_skip(minibatch)
            return
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        totals.loss += loss
        totals.entropy += part.entropy
        totals.kl += part.kl
        totals.grad_norm += norm
        totals.optimizer_steps += 1
        totals.ratios = totals.ratios + part.ratios

    def _fitting(self, steps: int, work: Callable[[], T]) -> T:
        """The result of work on a number of steps in micro-batches. Out of memory: they are halved, and it is repeated."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                tried = min(self.micro_batch, steps)
                if not _is_out_of_memory(error) or tried <= 1:
                    raise
                self.micro_batch = tried // 2
            # Outside the handler, where the failed work's tensors are no longer held by the traceback.
            self.optimizer.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _chunks(self, steps: list[TrainingStep]) -> list[list[TrainingStep]]:
        return [steps[i : i + self.micro_batch] for i in range(0, len(steps), self.micro_batch)]

    def _accumulate(self, minibatch: list[TrainingStep], denominators: Denominators) -> _Totals:
        """Gradients and sums of this process's part of a minibatch, micro-batch by micro-batch."""
        part = _Totals()
        for chunk in self._chunks(minibatch):
            self._micro_batch(chunk, denominators, part)
        return part

    def _micro_batch(self, chunk: list[TrainingStep], denominators: Denominators, part: _Totals) -> None:
        batch = self.collate(chunk)
        mask = batch.mask
        old = _before(chunk).to(mask.device)
        advantages = torch.tensor([[step.advantage] for step in chunk], dtype=torch.float32, device=mask.device)
        if self.mismatch != "none":
            sampled = _sampled(chunk).to(mask.device)
            advantages = advantages * mismatch_weights(old, sampled, mask, self.mismatch, self.loss.mismatch_cap)
        temperature = chunk[0].sample.temperature
        logprobs, entropies = self.policy(batch, temperature)
        name = self.loss.name
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss = LOSSES[name](logprobs, old, advantages, mask, denominators=denominators, **clip)
        loss = loss - self.loss.entropy * aggregate(name, entropies, mask, denominators)
        if self.loss.beta:
            divergence = k3_kl(logprobs, self._reference(batch, temperature))
            loss = loss + self.loss.beta * aggregate(name, divergence, mask, denominators)
            part.kl += float(divergence.detach()[mask].sum())
        self.accelerator.backward(loss)
        part.loss += float(loss.detach())
        part.entropy += float(entropies.detach()[mask].sum())
        part.ratios = part.ratios + ratio_statistics(logprobs.detach(), old, mask, advantages, name=name, **clip)

    @torch.no_grad()
    def _reference(self, batch: Any, temperature: float) -> Tensor:
        """Log-probabilities under the model before training, (B, C)."""
        with self.policy.reference():
            logprobs, _ = self.policy(batch, temperature)
        return cast(Tensor, logprobs)

    def _add_gradients(self) -> None:
        """Give every process the sum of all processes' gradients."""
        if self.accelerator.num_processes == 1:
            return
        parameters = self.policy.trainable_parameters()
        gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        # A weight that no process used has no gradient, as in a single process: one of 0 would let it decay.
        owned = parameters[0].new_tensor([p.grad is not None for p in parameters])
        # One message: an adapter is hundreds of small tensors.
        flat = self.accelerator.reduce(torch.cat([*gradients, owned]), reduction="sum")
        *sums, owners = flat.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, gradient, owner in zip(parameters, sums, owners.tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype) if owner else None

    def _judged(self, steps: list[TrainingStep]) -> list[TrainingStep]:
        """The steps with the log-probabilities that the learner gives their decisions now."""

        @torch.no_grad()
        def judged() -> list[TrainingStep]:
            done = []
            for chunk in self._chunks(steps):
                logprobs = self.policy(self.collate(chunk), chunk[0].sample.temperature)[0].float().cpu().numpy()
                done += [
                    replace(s, logprobs=row[: len(s.sample.decisions)]) for s, row in zip(chunk, logprobs, strict=True)
                ]
            return done

        return self._fitting(len(steps), judged)

    def _mismatch(self, steps: list[TrainingStep]) -> dict[str, float]:
        """How far the sampler's and the learner's log-probabilities of judged steps are apart, over all processes."""
        largest, ratios = 0.0, RatioStatistics()
        for chunk in self._chunks(steps):
            learner, sampler, mask = _before(chunk), _sampled(chunk), _decisions(chunk)
            differences = (learner - sampler)[mask].abs()
            largest = float(torch.maximum(differences.max(), torch.tensor(largest)))  # which keeps NaN
            ratios += mismatch_statistics(learner, sampler, mask, self.mismatch, self.loss.mismatch_cap)
        ratios = self._all_ratios(ratios)
        return {
            "mismatch": max(self._each(largest), key=lambda value: (math.isnan(value), value)),
            "mismatch/mean": ratios.ratio_mean,
            "mismatch/max": ratios.ratio_max if ratios.tokens else math.nan,
            "mismatch/ess": ratios.effective_sample_size,
            "mismatch/cut": ratios.clip_fraction,
        }

    def _kl(self, steps: list[TrainingStep]) -> float:
        """k3 estimate of the KL to the model before training, in nats a decision."""

        @torch.no_grad()
        def measured() -> tuple[float, int]:
            total, tokens = 0.0, 0
            for chunk in self._chunks(steps):
                batch, temperature = self.collate(chunk), chunk[0].sample.temperature
                logprobs, _ = self.policy(batch, temperature)
                total += float(k3_kl(logprobs, self._reference(batch, temperature))[batch.mask].sum())
                tokens += int(batch.mask.sum())
            return total, tokens

        return _mean(*self._sum(self._fitting(len(steps), measured)))

    def _all_ratios(self, own: RatioStatistics) -> RatioStatistics:
        sums = self._sum([own.tokens, own.clipped, own.ratio_sum, own.ratio_square_sum])
        return RatioStatistics(int(sums[0]), int(sums[1]), sums[2], sums[3], max(self._each(own.ratio_max)))

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Each value, added over all processes."""
        if self.accelerator.num_processes == 1:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        added: list[float] = self.accelerator.reduce(own, reduction="sum").tolist()
        return added

    def _each(self, value: float) -> list[float]:
        """The value of each process."""
        if self.accelerator.num_processes == 1:
            return [value]
        own = torch.tensor([value], dtype=torch.float64, device=self.accelerator.device)
        each: list[float] = self.accelerator.gather(own).tolist()
        return each


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


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _sampled(steps: Sequence[TrainingStep]) -> Tensor:
    """Log-probabilities of the decisions when they were sampled, (B, L), padded with 0."""
    return _padded([step.sample.logprobs[step.sample.decisions] for step in steps])


def _before(steps: Sequence[TrainingStep]) -> Tensor:
    """Those of the policy before the update, (B, L): the learner's own where it has been asked, else the sampler's."""
    return _padded(
        [step.sample.logprobs[step.sample.decisions] if step.logprobs is None else step.logprobs for step in steps]
    )


def _decisions(steps: Sequence[TrainingStep]) -> Tensor:
    """Mask of the decisions, bool (B, L)."""
    return _padded([np.ones(len(step.sample.decisions), dtype=np.float32) for step in steps]).bool()


def _padded(rows: Sequence[NDArray[np.float32]]) -> Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
