"""The correction for a sampler that is not quite the learner, against computations by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from table_policy import TablePolicy, gradient, make_learner, replies

from grpo_agents.config import LossConfig
from grpo_agents.rl.credit import TrainingStep
from grpo_agents.rl.losses import LOSSES
from grpo_agents.rl.mismatch import mismatch_statistics, mismatch_weights

MASK = torch.tensor([[True, True, False], [True, True, True]])
SAMPLER = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -1.0, -3.0]])
LEARNER = SAMPLER + torch.tensor([[math.log(4.0), math.log(0.5), math.nan], [math.log(0.5), math.log(1.5), 0.0]])
"""Ratios 4 and 1/2, of the whole reply 2; 1/2, 3/2 and 1, of the whole 3/4."""


@pytest.mark.parametrize(
    ("mode", "cap", "expected"),
    [
        ("none", 2.0, [[1, 1, 1], [1, 1, 1]]),
        ("token", 3.0, [[3, 0.5, 1], [0.5, 1.5, 1]]),
        ("sequence", 2.5, [[2, 2, 1], [0.75, 0.75, 0.75]]),
        ("sequence", 1.5, [[0, 0, 1], [0.75, 0.75, 0.75]]),
    ],
)
def test_weights_are_bounded_ratios(mode: str, cap: float, expected: list[list[float]]) -> None:
    weights = mismatch_weights(LEARNER, SAMPLER, MASK, mode, cap)  # type: ignore[arg-type]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(("mode", "ratios"), [("token", [4, 0.5, 0.5, 1.5, 1]), ("sequence", [2, 0.75])])
def test_statistics_are_of_the_ratios_before_they_are_bounded(mode: str, ratios: list[float]) -> None:
    found = mismatch_statistics(LEARNER, SAMPLER, MASK, mode, 1.75)  # type: ignore[arg-type]
    values = np.array(ratios)
    assert found.tokens == len(ratios)
    assert found.ratio_mean == pytest.approx(values.mean())
    assert found.ratio_max == pytest.approx(values.max())
    assert found.effective_sample_size == pytest.approx(values.sum() ** 2 / (len(values) * (values**2).sum()))
    assert found.clip_fraction == pytest.approx((values > 1.75).mean())


def found_gradient(
    policy: TablePolicy, steps: Sequence[TrainingStep], loss: LossConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """What an update of length 0 finds, a minibatch of all steps in micro-batches of 5."""
    return gradient(make_learner(policy, loss=loss, minibatch=len(steps), micro_batch=5), steps)


def misjudged(steps: Sequence[TrainingStep], factor: float) -> list[TrainingStep]:
    """The same replies from a sampler that gave the first token of each a probability `factor` times smaller."""
    found = []
    for step in steps:
        logprobs = step.sample.logprobs.copy()
        logprobs[0] -= math.log(factor)
        found.append(replace(step, sample=replace(step.sample, logprobs=logprobs)))
    return found


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("mode", ["none", "token", "sequence"])
def test_without_a_mismatch_nothing_changes(name: str, mode: str) -> None:
    policy = TablePolicy.random(12)
    steps = replies(policy, 12)
    plain, _ = found_gradient(policy, steps, LossConfig(name=name, entropy=0.0))  # type: ignore[arg-type]
    found, metrics = found_gradient(policy, steps, LossConfig(name=name, entropy=0.0, mismatch=mode))  # type: ignore[arg-type]
    torch.testing.assert_close(found, plain)
    assert metrics["mismatch"] < 1e-6
    assert metrics["mismatch/ess"] == pytest.approx(1.0)
    assert metrics["mismatch/cut"] == 0.0


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_reply_weighs_by_its_ratio_while_the_clip_sees_the_learner_s_own_change_alone(name: str) -> None:
    policy = TablePolicy.random(12)
    steps = replies(policy, 12)
    plain, _ = found_gradient(policy, steps, LossConfig(name=name, entropy=0.0))  # type: ignore[arg-type]
    loss = LossConfig(name=name, entropy=0.0, mismatch="sequence", mismatch_cap=2.0)  # type: ignore[arg-type]
    found, metrics = found_gradient(policy, misjudged(steps, 1.5), loss)
    torch.testing.assert_close(found, plain * 1.5, rtol=1e-4, atol=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1.0)
    assert metrics["mismatch"] == pytest.approx(math.log(1.5), rel=1e-5)
    assert (metrics["mismatch/mean"], metrics["mismatch/max"]) == pytest.approx((1.5, 1.5), rel=1e-5)
    dropped, metrics = found_gradient(policy, misjudged(steps, 2.5), loss)
    assert not dropped.any()
    assert metrics["mismatch/cut"] == 1.0


def test_a_wrong_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        LossConfig(mismatch_cap=0.5)


def test_mismatch_is_zero_for_records_of_the_same_weights() -> None:
    policy = TablePolicy.random(12)
    metrics = make_learner(policy, micro_batch=5).update(replies(policy, 12), lr=0.05, rng=np.random.default_rng(0))
    # Rows of a batch are computed as the row alone was.
    assert metrics["mismatch"] == 0.0


@pytest.mark.parametrize("error", [0.25, math.nan, -math.inf])
def test_mismatch_shows_a_record_that_the_policy_did_not_make(error: float) -> None:
    policy = TablePolicy.random(12)
    steps = replies(policy, 12)
    logprobs = steps[7].sample.logprobs.copy()
    logprobs[-1] += error
    steps[7] = replace(steps[7], sample=replace(steps[7].sample, logprobs=logprobs))
    learner = make_learner(policy, micro_batch=5, on_skip=lambda minibatch: None)
    expected = pytest.approx(abs(error), rel=1e-5, nan_ok=True)
    assert learner.update(steps, lr=0.05, rng=np.random.default_rng(0))["mismatch"] == expected
