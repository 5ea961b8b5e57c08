"""What the learner does when memory runs out, and when a loss or a gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from table_policy import TablePolicy, gradient, make_learner, replies
from torch import Tensor

from grpo_agents.config import LossConfig
from grpo_agents.rl.credit import TrainingStep


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


class Limited(TablePolicy):
    """Has memory for so many tokens of a batch, padding included."""

    room = 10**9
    error: Callable[[], Exception] = staticmethod(lambda: torch.OutOfMemoryError("CUDA out of memory."))

    def forward(self, batch: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        if batch.mask.numel() > self.room:
            raise type(self).error()
        return super().forward(batch, temperature)


@pytest.mark.parametrize(
    "error",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        lambda: RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    ],
    ids=["CUDA", "MPS"],
)
def test_out_of_memory_halves_the_micro_batch_and_leaves_no_trace_in_the_weights(
    error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limited, "error", staticmethod(error))
    table = TablePolicy.random(24).start
    settings: dict[str, Any] = {"minibatch": 8, "epochs": 2, "loss": LossConfig(beta=0.1, entropy=0.01)}
    weights = {}
    for name, room, micro_batch in (("limited", 11, 8), ("small", 10**9, 2), ("whole", 10**9, 8)):
        policy = Limited(table)
        steps = replies(policy, 24)
        policy.room = room
        learner = make_learner(policy, micro_batch=micro_batch, **settings)
        metrics = learner.update(steps, lr=0.05, rng=rng())
        assert (metrics["optimizer_steps"], metrics["skipped"]) == (6, 0)
        weights[name] = policy.table.detach()
        assert learner.micro_batch == {"limited": 2, "small": 2, "whole": 8}[name]
    # From the first minibatch on, 8 and 4 replies are too many: the sums are those of micro-batches of 2, to the bit.
    assert torch.equal(weights["limited"], weights["small"])
    # Adam divides by the size of the gradient: in other sums, rounding errors of 1e-7 of it are 1e-7 of a step.
    torch.testing.assert_close(weights["limited"], weights["whole"], rtol=0, atol=1e-5)
    assert float((weights["whole"] - table).abs().max()) > 0.1


def test_out_of_memory_in_the_middle_of_a_minibatch_leaves_no_gradient_behind() -> None:
    class Failing(TablePolicy):
        """Has no memory for the third batch that it is trained on."""

        def forward(self, batch: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
            result = super().forward(batch, temperature)
            if torch.is_grad_enabled() and len(self.trained) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return result

    gradients = []
    for kind, micro_batch in ((Failing, 2), (TablePolicy, 1)):
        policy = kind.random(8)
        learner = make_learner(policy, minibatch=8, micro_batch=micro_batch)
        gradients.append(gradient(learner, replies(policy, 8))[0])
        assert learner.micro_batch == 1
    assert torch.equal(*gradients)


def test_out_of_memory_for_a_single_step_comes_through() -> None:
    policy = Limited.random(4)
    steps = replies(policy, 4)
    assert isinstance(policy, Limited)
    policy.room = 0
    learner = make_learner(policy)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        learner.update(steps, lr=0.1, rng=rng())
    assert learner.micro_batch == 1
    assert torch.equal(policy.table, policy.start)


def test_another_error_is_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limited, "error", staticmethod(lambda: RuntimeError("shapes do not match")))
    policy = Limited.random(4)
    steps = replies(policy, 4)
    monkeypatch.setattr(Limited, "room", 0)
    learner = make_learner(policy, micro_batch=4)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        learner.update(steps, lr=0.1, rng=rng())
    assert learner.micro_batch == 4


class Poisoned(TablePolicy):
    """In context 5 the loss is finite and its gradient is not."""

    def forward(self, batch: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        logprobs, entropies = super().forward(batch, temperature)
        if 5 in batch.contexts:
            logprobs = logprobs + (0.0 * self.table[5, 0, 0]).sqrt()
        return logprobs, entropies


@pytest.mark.parametrize("broken", ["loss", "gradient"])
@pytest.mark.parametrize("micro_batch", [2, None])
def test_a_minibatch_that_is_not_finite_is_skipped_and_the_others_are_trained(
    broken: str, micro_batch: int | None
) -> None:
    policy: TablePolicy = Poisoned.random(16) if broken == "gradient" else TablePolicy.random(16)
    steps = replies(policy, 16)
    if broken == "loss":
        steps[5] = replace(steps[5], advantage=math.inf)
    skipped: list[list[TrainingStep]] = []
    learner = make_learner(policy, minibatch=4, micro_batch=micro_batch, on_skip=skipped.append)
    metrics = learner.update(steps, lr=0.05, rng=rng())

    (minibatch,) = skipped
    left_out = {index for index, step in enumerate(steps) if any(step is other for other in minibatch)}
    assert len(minibatch) == len(left_out) == 4
    assert 5 in left_out
    # Every context has one step, so that its row of the table changes only if that step was trained.
    changed = {int(row) for row in (policy.table != policy.start).nonzero()[:, 0]}
    assert changed == set(range(16)) - left_out
    (state,) = learner.optimizer.state.values()
    assert (metrics["skipped"], metrics["optimizer_steps"], int(state["step"])) == (1, 3, 3)
    assert all(math.isfinite(metrics[key]) for key in ("loss", "entropy", "grad_norm", "ratio/mean"))
    assert policy.table.isfinite().all()


def test_a_skipped_update_leaves_weights_and_optimizer_as_they_were() -> None:
    policy = TablePolicy.random(4)
    steps = replies(policy, 4)
    learner = make_learner(policy, on_skip=lambda minibatch: None)
    learner.update(steps, lr=0.05, rng=rng())
    weights = policy.table.detach().clone()
    (state,) = learner.optimizer.state.values()
    before = {key: value.clone() for key, value in state.items()}
    metrics = learner.update([replace(steps[0], advantage=math.nan), *steps[1:]], lr=0.05, rng=rng())
    assert (metrics["skipped"], metrics["optimizer_steps"]) == (1, 0)
    assert torch.equal(policy.table, weights)
    assert all(torch.equal(state[key], value) for key, value in before.items())
    # What the skipped minibatch left behind does not enter the next one.
    again, fresh = make_learner(policy), learner
    torch.testing.assert_close(gradient(fresh, steps)[0], gradient(again, steps)[0], rtol=0, atol=0)
