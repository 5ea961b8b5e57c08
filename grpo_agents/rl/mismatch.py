"""Correction for replies whose sampler is not quite the model that is trained.

A sampler of its own (vLLM's kernels, another precision) gives a token a slightly different probability than the learner
does, so its samples come from another distribution mu than the learner's own pi, even with the same weights. Importance
weights pi / mu make up for it; bounding them keeps a few unlucky tokens from ruling the update.

Notation in shapes as in `grpo_agents.rl.losses`: B sequences of a micro-batch, L tokens; mask_BL is bool.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_agents.rl.losses import MAX_LOG_RATIO, RatioStatistics, ratio_statistics

Mismatch = Literal["none", "token", "sequence"]


@torch.no_grad()
def mismatch_weights(learner_BL: Tensor, sampler_BL: Tensor, mask_BL: Tensor, mode: Mismatch, cap: float) -> Tensor:
    """Factors for the advantages of tokens, so that the sampler's tokens count as the learner's own.

    - none: 1.
    - token: min(pi / mu, cap) of each token (truncated importance sampling: Ionides, JCGS 2008; for this use Yao et al.,
      "Your efficient RL framework secretly brings you off-policy RL training", 2025).
    - sequence: pi / mu of the whole reply, and 0 for a reply where it is above `cap` (masked importance sampling: Liu et
      al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch", 2025).

    Args:
        learner_BL: float (B, L), log-probabilities under the learner before the update.
        sampler_BL: float (B, L), those of the distribution that the tokens were drawn from.
        mask_BL: the model's own tokens.
        mode: see above.
        cap: largest weight, at least 1.

    Returns:
        float (B, L), no gradient; 1 at dead positions.
    """
    difference_BL = torch.where(mask_BL, learner_BL - sampler_BL, 0.0)
    if mode == "none":
        return torch.ones_like(difference_BL)
    if mode == "token":
        return difference_BL.clamp(max=MAX_LOG_RATIO).exp().clamp(max=cap)
    ratio_B1 = difference_BL.sum(dim=1, keepdim=True).clamp(max=MAX_LOG_RATIO).exp()
    return torch.where(mask_BL, torch.where(ratio_B1 > cap, 0.0, ratio_B1), 1.0)


def mismatch_statistics(
    learner_BL: Tensor, sampler_BL: Tensor, mask_BL: Tensor, mode: Mismatch, cap: float
) -> RatioStatistics:
    """Sums of the ratios pi / mu: of tokens; of whole replies in `sequence` mode. `clipped` are those above `cap`."""
    if mode == "sequence":
        learner_BL, sampler_BL = (
            torch.where(mask_BL, logprobs_BL, 0.0).sum(dim=1, keepdim=True) for logprobs_BL in (learner_BL, sampler_BL)
        )
        mask_BL = mask_BL.any(dim=1, keepdim=True)
    no_advantage = torch.zeros(len(mask_BL), device=mask_BL.device)
    return ratio_statistics(learner_BL, sampler_BL, mask_BL, no_advantage, 1.0, cap - 1.0, name="cispo")
