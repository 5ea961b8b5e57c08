"""Losses against plain-Python loops over floats, and properties that hold whatever the numbers."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from grpo_agents.config import LossConfig
from grpo_agents.errors import ConfigError
from grpo_agents.rl.losses import (
    DEFAULT_CLIP,
    LOSSES,
    Denominators,
    RatioStatistics,
    aggregate,
    k3_kl,
    ratio_statistics,
)

MAX_TOKENS = 10
NAMES = list(LOSSES)
# Ratios inside and outside of every clip range, on both sides; each meets both signs of the advantage.
RATIOS = [[1.05, 0.7, 1.5], [6.0, 1.25, 0.9999], [0.95, 1.4, 0.5], [1.0002, 1.0, 0.1], [3.0, 0.6, 1.1]]
LENGTHS = [3, 2, 3, 1, 3]
ADVANTAGES = [0.8, -1.2, -0.5, 1.7, 0.0]


def golden(
    name: str,
    logprobs: list[list[float]],
    olds: list[list[float]],
    advantages: list[float],
    lengths: list[int],
    low: float,
    high: float,
) -> float:
    """The loss over sequences given as lists of floats, straight from the papers' formulas."""
    sequences = sum(1 for length in lengths if length)
    tokens = sum(lengths)
    total = 0.0
    for lp, old, advantage, length in zip(logprobs, olds, advantages, lengths, strict=True):
        if length == 0:
            continue
        mean_log_ratio = sum(lp[t] - old[t] for t in range(length)) / length
        for t in range(length):
            ratio = math.exp(mean_log_ratio if name == "gspo" else lp[t] - old[t])
            clipped = min(max(ratio, 1 - low), 1 + high)
            objective = min(ratio * advantage, clipped * advantage)
            if name == "cispo":
                objective = clipped * advantage * lp[t]
            weight = {
                "grpo": 1 / (sequences * length),
                "gspo": 1 / (sequences * length),
                "dr_grpo": 1 / (sequences * MAX_TOKENS),
                "dapo": 1 / tokens,
                "cispo": 1 / tokens,
            }[name]
            total -= weight * objective
    return total


def batch(
    ratios: list[list[float]] = RATIOS, lengths: list[int] = LENGTHS, advantages: list[float] = ADVANTAGES
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, old, advantages, mask) as float32 tensors, padded with values that must not matter."""
    ratios_BL = torch.tensor(ratios, dtype=torch.float32)
    olds = -0.3 - 0.2 * torch.arange(ratios_BL.numel(), dtype=torch.float32).reshape(ratios_BL.shape)
    mask = torch.arange(ratios_BL.shape[1]).expand_as(ratios_BL) < torch.tensor(lengths)[:, None]
    logprobs = torch.where(mask, olds + ratios_BL.log(), torch.tensor(5.0)).requires_grad_()
    return logprobs, olds, torch.tensor(advantages), mask


def random_batch(size: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    olds = -torch.rand(size, length, generator=generator) * 2
    logprobs = olds + 0.4 * torch.randn(size, length, generator=generator)
    lengths = torch.randint(0, length + 1, (size,), generator=generator)
    mask = torch.arange(length).expand(size, length) < lengths[:, None]
    return logprobs.requires_grad_(), olds, torch.randn(size, generator=generator), mask


def loss_and_gradient(
    name: str,
    logprobs: Tensor,
    olds: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float] | None = None,
    denominators: Denominators | None = None,
) -> tuple[Tensor, Tensor]:
    low, high = clip or DEFAULT_CLIP[name]
    leaf = logprobs.detach().clone().requires_grad_()
    denominators = denominators or Denominators.count(mask, MAX_TOKENS)
    loss = LOSSES[name](leaf, olds, advantages, mask, denominators=denominators, clip_low=low, clip_high=high)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def test_every_configurable_loss_is_there() -> None:
    choices = get_args(LossConfig.model_fields["name"].annotation)
    assert set(choices) == set(LOSSES) == set(DEFAULT_CLIP)


@pytest.mark.parametrize("clip", [None, (0.2, 0.3)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", NAMES)
def test_golden_values(name: str, sign: float, clip: tuple[float, float] | None) -> None:
    logprobs, olds, advantages, mask = batch(advantages=[sign * advantage for advantage in ADVANTAGES])
    low, high = clip or DEFAULT_CLIP[name]
    expected = golden(name, logprobs.tolist(), olds.tolist(), advantages.tolist(), LENGTHS, low, high)
    loss, _ = loss_and_gradient(name, logprobs, olds, advantages, mask, clip=clip)
    assert loss.dtype == torch.float32
    # float32 against double: a dozen operations of relative error 6e-8 each, on terms of up to 7.
    assert loss.item() == pytest.approx(expected, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences_of_the_golden_values(name: str) -> None:
    logprobs, olds, advantages, mask = batch()
    low, high = DEFAULT_CLIP[name]
    _, gradient = loss_and_gradient(name, logprobs, olds, advantages, mask)
    lp, old, a = logprobs.tolist(), olds.tolist(), advantages.tolist()
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            if name == "cispo":  # Its weight is held constant, which a difference quotient cannot do.
                weight = min(max(math.exp(lp[row][t] - old[row][t]), 1 - low), 1 + high)
                expected = -weight * a[row] / sum(LENGTHS)
            else:
                values = []
                for shift in (1e-6, -1e-6):
                    moved = [list(values_L) for values_L in lp]
                    moved[row][t] += shift
                    values.append(golden(name, moved, old, a, LENGTHS, low, high))
                expected = (values[0] - values[1]) / 2e-6
            assert gradient[row, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert torch.all(gradient[~mask] == 0)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_on_policy_gradient_is_that_of_reinforce(name: str) -> None:
    logprobs, _, advantages, mask = batch()
    _, gradient = loss_and_gradient(name, logprobs, logprobs.detach(), advantages, mask)
    lengths = torch.tensor(LENGTHS)[:, None]
    torch.testing.assert_close(gradient, -(advantages[:, None] / lengths / len(LENGTHS)) * mask)


@pytest.mark.parametrize("parts", [[3, 4], [1] * 7])
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_minibatch(name: str, parts: list[int]) -> None:
    tensors = random_batch(7, 5)
    whole, whole_gradient = loss_and_gradient(name, *tensors)
    denominators = Denominators.count(tensors[3], MAX_TOKENS)
    pieces = [
        loss_and_gradient(name, *piece, denominators=denominators)
        for piece in zip(*(tensor.split(parts) for tensor in tensors), strict=True)
    ]
    assert sum(loss.item() for loss, _ in pieces) == pytest.approx(whole.item(), abs=1e-6)
    torch.testing.assert_close(torch.cat([grad for _, grad in pieces]), whole_gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_order_of_sequences_and_extra_padding_do_not_matter(name: str) -> None:
    tensors = random_batch(7, 5)
    loss, gradient = loss_and_gradient(name, *tensors)
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    logprobs, olds, advantages, mask = (tensor[order] for tensor in tensors)
    pad = torch.nn.functional.pad
    moved = (pad(logprobs, (2, 1), value=-3.0), pad(olds, (2, 1), value=7.0), advantages, pad(mask, (2, 1)))
    moved_loss, moved_gradient = loss_and_gradient(name, *moved)
    assert moved_loss.item() == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(moved_gradient[:, 2:-1], gradient[order])


@pytest.mark.parametrize("name", NAMES)
def test_one_advantage_for_each_token_generalises_one_for_each_sequence(name: str) -> None:
    logprobs, olds, advantages, mask = random_batch(7, 5)
    per_sequence = loss_and_gradient(name, logprobs, olds, advantages, mask)
    per_token = loss_and_gradient(name, logprobs, olds, advantages[:, None].expand(7, 5), mask)
    torch.testing.assert_close(per_token, per_sequence, rtol=0, atol=0)


@pytest.mark.parametrize("other", ["dapo", "gspo"])
def test_losses_that_coincide_for_replies_of_one_token(other: str) -> None:
    logprobs, olds, advantages, _ = random_batch(7, 1)
    mask = torch.ones(7, 1, dtype=torch.bool)
    expected = loss_and_gradient("grpo", logprobs, olds, advantages, mask, clip=(0.2, 0.3))
    torch.testing.assert_close(
        loss_and_gradient(other, logprobs, olds, advantages, mask, clip=(0.2, 0.3)), expected, rtol=0, atol=1e-6
    )


def test_losses_that_coincide_for_replies_of_one_length() -> None:
    logprobs, olds, advantages, _ = random_batch(7, 5)
    mask = torch.ones(7, 5, dtype=torch.bool)
    clip = (0.2, 0.3)
    expected = loss_and_gradient("grpo", logprobs, olds, advantages, mask, clip=clip)
    same_limit = Denominators(sequences=7, tokens=35, max_tokens=5)
    for name in ("dapo", "dr_grpo"):
        actual = loss_and_gradient(name, logprobs, olds, advantages, mask, clip=clip, denominators=same_limit)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_cispo_keeps_the_gradient_that_grpo_clips_away() -> None:
    logprobs, olds, advantages, mask = batch([[6.0]], [1], [2.0])
    assert loss_and_gradient("grpo", logprobs, olds, advantages, mask)[1].item() == 0.0
    # Weight 6 is bounded at 1 + 4, times the advantage 2.
    assert loss_and_gradient("cispo", logprobs, olds, advantages, mask)[1].item() == pytest.approx(-10.0)


@pytest.mark.parametrize("dead", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_dead_rows_and_positions_add_exactly_nothing(name: str, dead: float) -> None:
    logprobs, olds, advantages, mask = batch()
    expected = loss_and_gradient(name, logprobs, olds, advantages, mask)
    filled = torch.where(mask, logprobs, dead)
    filled = torch.cat([filled, torch.full((1, 3), dead)])
    filled_olds = torch.cat([torch.where(mask, olds, dead), torch.full((1, 3), dead)])
    more_mask = torch.cat([mask, torch.zeros(1, 3, dtype=torch.bool)])
    more_advantages = torch.where(more_mask, torch.cat([advantages, torch.zeros(1)])[:, None], dead)
    loss, gradient = loss_and_gradient(name, filled, filled_olds, more_advantages, more_mask)
    torch.testing.assert_close(gradient, torch.cat([expected[1], torch.zeros(1, 3)]), rtol=0, atol=0)
    # One more row changes the order in which float32 terms are added.
    assert loss.item() == pytest.approx(expected[0].item(), abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_minibatch_without_live_tokens_is_zero(name: str) -> None:
    logprobs, olds, advantages, mask = batch(lengths=[0] * 5)
    loss, gradient = loss_and_gradient(name, logprobs, olds, advantages, mask)
    assert loss.item() == 0.0
    assert torch.all(gradient == 0)


@pytest.mark.parametrize("log_ratio", [500.0, -500.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", NAMES)
def test_absurd_ratios_stay_finite(name: str, advantage: float, log_ratio: float) -> None:
    olds = torch.full((1, 2), -1.0)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, gradient = loss_and_gradient(name, olds + log_ratio, olds, torch.tensor([advantage]), mask)
    assert math.isfinite(loss.item())
    assert torch.isfinite(gradient).all()


def test_aggregate_normalises_like_the_loss_beside_it() -> None:
    values = torch.tensor([[1.0, 2.0, 6.0], [5.0, math.nan, math.inf], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    denominators = Denominators.count(mask, MAX_TOKENS)
    assert denominators == Denominators(sequences=2.0, tokens=4.0, max_tokens=10)
    expected = {"grpo": (3 + 5) / 2, "gspo": (3 + 5) / 2, "dr_grpo": 14 / 20, "dapo": 14 / 4, "cispo": 14 / 4}
    for name, value in expected.items():
        assert aggregate(name, values, mask, denominators).item() == pytest.approx(value)
    with pytest.raises(ConfigError, match=r"'gpro'.*grpo"):
        aggregate("gpro", values, mask, denominators)


def test_k3_kl_by_hand_and_its_expectation_is_the_kl() -> None:
    kl = k3_kl(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5]))
    expected = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1, 0.0]
    torch.testing.assert_close(kl, torch.tensor(expected))
    policy, reference = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.4, 0.4, 0.2])
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert (policy * k3_kl(policy.log(), reference.log())).sum().item() == pytest.approx(exact, rel=1e-5)


def test_ratio_statistics_by_hand() -> None:
    logprobs, olds, advantages, mask = batch([[1.5, 0.5, 1.0], [1.5, 0.5, 9.0]], [3, 2], [1.0, -1.0])
    statistics = ratio_statistics(logprobs, olds, mask, advantages, 0.2, 0.2)
    assert statistics.tokens == 5
    assert statistics.clipped == 2  # 1.5 with A > 0 and 0.5 with A < 0; the other two are left to min().
    assert statistics.clip_fraction == pytest.approx(0.4)
    assert statistics.ratio_mean == pytest.approx(5.0 / 5)
    assert statistics.ratio_max == pytest.approx(1.5)
    assert statistics.effective_sample_size == pytest.approx(25.0 / (5 * (2.25 + 0.25 + 1 + 2.25 + 0.25)))
    # Sequence ratios are 0.75 ** (1 / 3) = 0.91 (A > 0) and 0.75 ** (1 / 2) = 0.87 (A < 0): the second's 2 tokens.
    assert ratio_statistics(logprobs, olds, mask, advantages, 0.05, 0.05, name="gspo").clipped == 2
    assert ratio_statistics(logprobs, olds, mask, advantages, 0.2, 0.2, name="cispo").clipped == 4


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cispo"])
def test_the_clip_is_counted_exactly_where_the_gradient_is_lost(name: str) -> None:
    logprobs, olds, advantages, mask = random_batch(20, 5)
    _, gradient = loss_and_gradient(name, logprobs, olds, advantages, mask)
    lost = int(((gradient == 0) & mask).sum())
    assert lost > 0
    statistics = ratio_statistics(logprobs, olds, mask, advantages, *DEFAULT_CLIP[name], name=name)
    assert statistics.clipped == lost


def test_ratio_statistics_add_up() -> None:
    tensors = random_batch(7, 5)
    logprobs, olds, advantages, mask = tensors
    whole = ratio_statistics(logprobs, olds, mask, advantages, 0.2, 0.2)
    total = RatioStatistics()
    for piece in zip(*(tensor.split([1, 2, 4]) for tensor in tensors), strict=True):
        total = total + ratio_statistics(piece[0], piece[1], piece[3], piece[2], 0.2, 0.2)
    assert (total.tokens, total.clipped, total.ratio_max) == (whole.tokens, whole.clipped, whole.ratio_max)
    assert total.ratio_sum == pytest.approx(whole.ratio_sum, rel=1e-12)
    assert total.ratio_square_sum == pytest.approx(whole.ratio_square_sum, rel=1e-12)


def test_ratio_statistics_of_nothing() -> None:
    logprobs, olds, advantages, mask = batch(lengths=[0] * 5)
    nothing = ratio_statistics(logprobs, olds, mask, advantages, 0.2, 0.2)
    assert nothing == RatioStatistics()
    assert math.isnan(nothing.clip_fraction) and math.isnan(nothing.ratio_mean)
    assert math.isnan(nothing.effective_sample_size)
