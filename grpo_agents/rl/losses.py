"""Policy losses, KL and ratio statistics as pure functions on torch tensors.

Notation:
    B   sequences of a micro-batch (a step's reply, or a conversation)
    L   completion tokens, padded on either side; mask_BL is True at the tokens that the model itself produced
    lp  logprobs_BL, float (B, L): natural log-probabilities under the policy being trained, with gradient
    old old_logprobs_BL, float (B, L): the same under the policy that sampled, without gradient
    A   advantages, float (B,) for each sequence or (B, L) for each token
    r   exp(lp - old), the importance ratio of a token
    live: a token where the mask is True; a sequence with at least one such token

Micro-batches: every loss returns the sum over its micro-batch, already divided by the denominators of the whole
minibatch. Adding the losses (or the gradients) of micro-batches thus gives those of the minibatch, whatever their size.

Dead positions add exactly 0 to a policy loss and to its gradient, whatever stands there, NaN included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_agents.errors import ConfigError

# exp(20) is 5e8: far beyond any ratio that means something, and finite in every dtype but float16. Without the bound an
# overflowing ratio on the clipped side turns its zero gradient into 0 * inf.
MAX_LOG_RATIO = 20.0

DEFAULT_CLIP: dict[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""(clip_low, clip_high) of each loss: ratios are clipped to [1 - clip_low, 1 + clip_high].

dapo and gspo: their papers. grpo and dr_grpo: the usual 0.2 of PPO, also TRL's. cispo: the paper (arXiv 2506.13585) has
no lower bound, which 1.0 is, and does not print its upper one; the ratio's bound of 5 is that of TRL's documentation,
from ScaleRL (arXiv 2510.13786)."""


@dataclass(frozen=True)
class Denominators:
    """What a minibatch's sums are divided by; the same for all of its micro-batches.

    Attributes:
        sequences: live sequences of the minibatch, over all processes.
        tokens: live tokens of the minibatch, over all processes.
        max_tokens: the generation limit in tokens, a constant of the run; dr_grpo alone divides by it.

    Where gradients are averaged over processes (DDP) instead of added, multiply the loss by the number of processes.
    """

    sequences: float
    tokens: float
    max_tokens: float

    @classmethod
    def count(cls, mask_BL: Tensor, max_tokens: float) -> Denominators:
        """Denominators of a minibatch that one process holds whole; mask_BL is bool (B, L)."""
        return cls(sequences=float(mask_BL.any(dim=1).sum()), tokens=float(mask_BL.sum()), max_tokens=max_tokens)


class PolicyLoss(Protocol):
    """The form of every loss in `LOSSES`.

    Args:
        logprobs_BL, old_logprobs_BL, advantages, mask_BL: see the module's notation; mask_BL is bool.
        denominators: of the whole minibatch.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].

    Returns:
        Scalar to minimise, in the dtype of logprobs_BL: this micro-batch's share of the minibatch's loss.
    """

    def __call__(
        self,
        logprobs_BL: Tensor,
        old_logprobs_BL: Tensor,
        advantages: Tensor,
        mask_BL: Tensor,
        *,
        denominators: Denominators,
        clip_low: float,
        clip_high: float,
    ) -> Tensor: ...


def aggregate(name: str, values_BL: Tensor, mask_BL: Tensor, denominators: Denominators) -> Tensor:
    """Reduce per-token values as the loss called `name` reduces its own; for the KL and entropy terms beside it.

    - grpo, gspo: mean over sequences of the mean over a sequence's tokens.
    - dr_grpo: sum over tokens / (sequences * max_tokens), so that a long reply's tokens weigh no less.
    - dapo, cispo: mean over all tokens of the minibatch.

    Args:
        name: a key of `LOSSES`.
        values_BL: float (B, L); dead positions are ignored.
        mask_BL: bool (B, L).
        denominators: of the whole minibatch. A minibatch without live tokens gives 0.

    Returns:
        Scalar: this micro-batch's share.

    Raises:
        ConfigError: no loss has that name.
    """
    values_BL = torch.where(mask_BL, values_BL, 0.0)
    if name in ("grpo", "gspo"):
        means_B = values_BL.sum(dim=1) / _lengths(mask_BL)
        return means_B.sum() / max(denominators.sequences, 1.0)
    if name == "dr_grpo":
        return values_BL.sum() / (max(denominators.sequences, 1.0) * denominators.max_tokens)
    if name in ("dapo", "cispo"):
        return values_BL.sum() / max(denominators.tokens, 1.0)
    raise ConfigError([f"loss.name={name!r} is no loss, perhaps misspelt; choose one of {', '.join(LOSSES)}"])


def grpo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    mask_BL: Tensor,
    *,
    denominators: Denominators,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """GRPO (DeepSeekMath, arXiv 2402.03300): -mean over sequences of mean over tokens of min(r A, clip(r) A).

    The paper's KL term is added by the caller: `aggregate("grpo", k3_kl(...), ...)`. Arguments: see `PolicyLoss`.
    """
    ratio_BL = _log_ratio(logprobs_BL, old_logprobs_BL, mask_BL).exp()
    surrogate_BL = _clipped_surrogate(ratio_BL, advantages, mask_BL, clip_low, clip_high)
    return -aggregate("grpo", surrogate_BL, mask_BL, denominators)


def dr_grpo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    mask_BL: Tensor,
    *,
    denominators: Denominators,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): GRPO's clipped term, summed over tokens and divided by a constant length.

    The paper's other half, advantages that are not divided by the standard deviation, is a matter of the advantages.
    Arguments: see `PolicyLoss`.
    """
    ratio_BL = _log_ratio(logprobs_BL, old_logprobs_BL, mask_BL).exp()
    surrogate_BL = _clipped_surrogate(ratio_BL, advantages, mask_BL, clip_low, clip_high)
    return -aggregate("dr_grpo", surrogate_BL, mask_BL, denominators)


def dapo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    mask_BL: Tensor,
    *,
    denominators: Denominators,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """DAPO (arXiv 2503.14476): GRPO's clipped term with a higher upper bound, as a mean over all tokens.

    The paper takes the mean over the tokens of a group; here it goes over those of the minibatch. Dynamic sampling and
    the penalty on overlong replies are no part of the loss. Arguments: see `PolicyLoss`.
    """
    ratio_BL = _log_ratio(logprobs_BL, old_logprobs_BL, mask_BL).exp()
    surrogate_BL = _clipped_surrogate(ratio_BL, advantages, mask_BL, clip_low, clip_high)
    return -aggregate("dapo", surrogate_BL, mask_BL, denominators)


def gspo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    mask_BL: Tensor,
    *,
    denominators: Denominators,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """GSPO (arXiv 2507.18071): the clipped term with the ratio of a sequence, s = exp(mean over tokens of lp - old).

    Written in the paper's GSPO-token form, in which each token's ratio has the value s and the gradient s * grad lp.
    With one advantage for each sequence it equals GSPO in value and gradient; it also takes advantages for each token.
    Arguments: see `PolicyLoss`.
    """
    log_ratio_BL = _log_ratio(logprobs_BL, old_logprobs_BL, mask_BL)
    mean_B1 = (log_ratio_BL.sum(dim=1) / _lengths(mask_BL)).unsqueeze(1)
    ratio_BL = (mean_B1.detach() + (log_ratio_BL - log_ratio_BL.detach())).exp()
    surrogate_BL = _clipped_surrogate(ratio_BL, advantages, mask_BL, clip_low, clip_high)
    return -aggregate("gspo", surrogate_BL, mask_BL, denominators)


def cispo_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages: Tensor,
    mask_BL: Tensor,
    *,
    denominators: Denominators,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -mean over all tokens of clip(r) A lp, with clip(r) held constant.

    Clipping bounds a token's weight and never silences the token. The paper takes the mean over the tokens of a group;
    here it goes over those of the minibatch. Arguments: see `PolicyLoss`.
    """
    log_ratio_BL = _log_ratio(logprobs_BL.detach(), old_logprobs_BL, mask_BL)
    weight_BL = log_ratio_BL.exp().clamp(1.0 - clip_low, 1.0 + clip_high)
    live_logprobs_BL = torch.where(mask_BL, logprobs_BL, 0.0)
    return -aggregate("cispo", weight_BL * _per_token(advantages, mask_BL) * live_logprobs_BL, mask_BL, denominators)


LOSSES: dict[str, PolicyLoss] = {
    "grpo": grpo_loss,
    "dr_grpo": dr_grpo_loss,
    "dapo": dapo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
}


def k3_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at sampled tokens: exp(d) - d - 1 with d = ref - lp, never negative.

    The third estimator of Schulman, "Approximating KL Divergence" (2020), unbiased where tokens come from the policy.

    Args:
        logprobs: float, any shape: the policy's log-probabilities, with gradient.
        ref_logprobs: same shape: the reference's. Padding must be finite in both (0 for instance).

    Returns:
        Same shape, in nats.
    """
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference


@dataclass(frozen=True)
class RatioStatistics:
    """Sums over live tokens; `a + b` is the statistics of both micro-batches together, `RatioStatistics()` of none.

    Attributes:
        tokens: number of live tokens.
        clipped: those at which the clip is active.
        ratio_sum, ratio_square_sum, ratio_max: of the tokens' ratios.

    The properties are NaN where there are no tokens.
    """

    tokens: int = 0
    clipped: int = 0
    ratio_sum: float = 0.0
    ratio_square_sum: float = 0.0
    ratio_max: float = -math.inf

    def __add__(self, other: RatioStatistics) -> RatioStatistics:
        return RatioStatistics(
            tokens=self.tokens + other.tokens,
            clipped=self.clipped + other.clipped,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_square_sum=self.ratio_square_sum + other.ratio_square_sum,
            ratio_max=max(self.ratio_max, other.ratio_max),
        )

    @property
    def clip_fraction(self) -> float:
        """Share of the tokens at which the clip is active, in [0, 1]."""
        return self.clipped / self.tokens if self.tokens else math.nan

    @property
    def ratio_mean(self) -> float:
        """Near 1 when the tokens really come from the old policy."""
        return self.ratio_sum / self.tokens if self.tokens else math.nan

    @property
    def effective_sample_size(self) -> float:
        """(sum r)^2 / (n sum r^2) in (0, 1]: the share of the tokens that equally weighted ones would be worth."""
        return self.ratio_sum**2 / (self.tokens * self.ratio_square_sum) if self.tokens else math.nan


@torch.no_grad()
def ratio_statistics(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    mask_BL: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    *,
    name: str = "grpo",
) -> RatioStatistics:
    """Sums of the tokens' ratios, and of the tokens at which the loss's clip is active.

    The ratios are those of single tokens for every loss: they show how far policy and sampler have drifted apart. Only
    the clip count follows the loss:

    - grpo, dr_grpo, dapo: r > 1 + clip_high with A > 0, or r < 1 - clip_low with A < 0; else min() undoes it.
    - gspo: the same for the sequence's ratio, counted at each of its tokens.
    - cispo: r out of range, whatever the sign of A.

    Args:
        logprobs_BL, old_logprobs_BL, mask_BL, advantages: see the module's notation; mask_BL is bool.
        clip_low, clip_high: as given to the loss.
        name: a key of `LOSSES`.

    Returns:
        Sums in double precision, the same (to rounding) however the batch is split.
    """
    # On the CPU, since not every device has float64; these are few numbers.
    mask_BL = mask_BL.cpu()
    logprobs_BL, old_logprobs_BL = logprobs_BL.cpu().double(), old_logprobs_BL.cpu().double()
    if not bool(mask_BL.any()):
        return RatioStatistics()
    log_ratio_BL = _log_ratio(logprobs_BL, old_logprobs_BL, mask_BL)
    ratio_N = log_ratio_BL[mask_BL].exp()
    judged_BL = log_ratio_BL
    if name == "gspo":
        judged_BL = (log_ratio_BL.sum(dim=1) / _lengths(mask_BL)).unsqueeze(1).expand_as(log_ratio_BL)
    judged_N = judged_BL[mask_BL].exp()
    above_N, below_N = judged_N > 1.0 + clip_high, judged_N < 1.0 - clip_low
    if name != "cispo":
        advantages_N = _per_token(advantages.cpu(), mask_BL)[mask_BL]
        above_N, below_N = above_N & (advantages_N > 0), below_N & (advantages_N < 0)
    return RatioStatistics(
        tokens=int(mask_BL.sum()),
        clipped=int((above_N | below_N).sum()),
        ratio_sum=float(ratio_N.sum()),
        ratio_square_sum=float(ratio_N.square().sum()),
        ratio_max=float(ratio_N.max()),
    )


def _lengths(mask_BL: Tensor) -> Tensor:
    """(B,) live tokens of each sequence; 1 for a dead one, whose sum is 0 anyway."""
    return mask_BL.sum(dim=1).clamp(min=1)


def _per_token(advantages: Tensor, mask_BL: Tensor) -> Tensor:
    """(B, L) advantages from (B,) or (B, L)."""
    return (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).expand_as(mask_BL)


def _log_ratio(logprobs_BL: Tensor, old_logprobs_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """(B, L) lp - old, within +-MAX_LOG_RATIO; 0 at dead positions, of which no gradient passes back to lp."""
    live_BL = torch.where(mask_BL, logprobs_BL, 0.0)
    return (live_BL - torch.where(mask_BL, old_logprobs_BL, 0.0)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_surrogate(
    ratio_BL: Tensor, advantages: Tensor, mask_BL: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """(B, L) min(r A, clip(r) A): PPO's pessimistic objective, to be maximised."""
    advantages_BL = _per_token(advantages, mask_BL)
    return torch.minimum(ratio_BL * advantages_BL, ratio_BL.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_BL)
