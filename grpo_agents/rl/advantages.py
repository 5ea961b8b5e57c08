"""Advantages: how much better a member of a group, or one of its steps, did than the others from the same start.

Pure functions on numpy arrays in float64. Three estimators:

- `episode_advantages`: one number for each episode, its return against the group's (GRPO, arXiv 2402.03300).
- `return_to_go_advantages`: one number for each step, its discounted return-to-go against the other members' at the
  same step.
- `gae_advantages`: one number for each step, how much better things went than its value foretold (generalised advantage
  estimation, arXiv 1506.02438).

An estimator takes what is known of one group and returns one entry for each member; scaling over a whole batch is
`scale_by_std`, whatever the estimator. One that compares steps by what was seen there instead of by their index, as
GiGPO (arXiv 2505.10978) does, is a third function of the same form that also takes the steps' observation hashes.

Notation in shapes: T steps of an episode, G group members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FlatCause = Literal["all_solved", "all_failed", "all_invalid", "mixed_ends", "ungraded"]


def episode_advantages(returns_G: Array, *, normalize_std: bool, eps: float = 1e-6) -> Array:
    """Return of each member minus the group's mean, optionally divided by the group's standard deviation.

    The standard deviation is the sample's (divisor G - 1), as TRL computes it; DeepSeekMath (arXiv 2402.03300) does not
    say which. Without the division this is Dr. GRPO's advantage (arXiv 2503.20783).

    Args:
        returns_G: (G,) returns. NaN marks a member that cannot be graded (a fault, or a reward that is None).
        normalize_std: whether to divide by standard deviation + eps.
        eps: added to the standard deviation, in units of return.

    Returns:
        (G,) advantages. Members marked NaN count neither in the mean nor in the deviation and stay NaN, for the caller
        to drop. A group of which one member alone is graded has advantage 0 there.
    """
    returns_G = np.asarray(returns_G, dtype=np.float64)
    graded = returns_G[~np.isnan(returns_G)]
    if graded.size == 0:
        return np.full_like(returns_G, np.nan)
    advantages_G: Array = returns_G - graded.mean()
    if normalize_std:
        advantages_G /= (graded.std(ddof=1) if graded.size > 1 else 0.0) + eps
    return advantages_G


def returns_to_go(rewards_T: Array, gamma: float, bootstrap: float) -> Array:
    """Discounted sum of the rewards from each step on.

    Args:
        rewards_T: (T,) reward of each step.
        gamma: discount for each step, in (0, 1].
        bootstrap: value of the state after the last step: 0 after a failure, `limit_bootstrap` after a limit.

    Returns:
        (T,) with entry t = rewards[t] + gamma * entry t + 1, where entry T is the bootstrap.
    """
    result = np.empty(len(rewards_T), dtype=np.float64)
    value = float(bootstrap)
    for t in range(len(rewards_T) - 1, -1, -1):
        value = float(rewards_T[t]) + gamma * value
        result[t] = value
    return result


def limit_bootstrap(rewards_T: Array, gamma: float) -> float:
    """Value of the state in which a limit (EndReason TRUNCATED or STOPPED) cut an episode.

    There is no critic, so the episode is taken to go on earning its mean reward for ever: mean / (1 - gamma). At gamma
    1 that sum has no end; undiscounted returns are not extrapolated and the value is 0, as after a failure.

    Args:
        rewards_T: (T,) rewards up to the cut.
        gamma: discount for each step, in (0, 1].

    Returns:
        The value; 0 for gamma 1 and for an episode without steps.
    """
    if gamma >= 1.0 or len(rewards_T) == 0:
        return 0.0
    return float(np.mean(rewards_T)) / (1.0 - gamma)


def return_to_go_advantages(rewards: Sequence[Array], bootstraps: Sequence[float], gamma: float) -> list[Array]:
    """Return-to-go of each step minus the mean return-to-go of the other members at the same step.

    A member that ended before a step still counts in the others' baseline there, with its bootstrap: 0 for one that
    failed, what it would be earning for one that a limit cut. Leaving the member itself out keeps the baseline
    independent of its own actions. A group of one has no baseline; 0 is subtracted.

    Args:
        rewards: G arrays (T_g,), the rewards of each member. Leave out members that cannot be graded.
        bootstraps: (G,) value of the state after each member's last step, see `returns_to_go`.
        gamma: discount for each step, in (0, 1].

    Returns:
        G arrays (T_g,).
    """
    group_size = len(rewards)
    longest = max((len(rewards_T) for rewards_T in rewards), default=0)
    values_GT = np.repeat(np.asarray(bootstraps, dtype=np.float64)[:, None], longest, axis=1)
    for member, rewards_T in enumerate(rewards):
        values_GT[member, : len(rewards_T)] = returns_to_go(rewards_T, gamma, bootstraps[member])
    if group_size > 1:
        others_GT = (values_GT.sum(axis=0, keepdims=True) - values_GT) / (group_size - 1)
        values_GT = values_GT - others_GT
    return [values_GT[member, : len(rewards_T)] for member, rewards_T in enumerate(rewards)]


def gae_advantages(rewards_T: Array, values_T: Array, gamma: float, gae_lambda: float, *, terminated: bool) -> Array:
    """Generalised advantage estimates (Schulman et al., arXiv 1506.02438) of one episode's steps.

    Args:
        rewards_T: (T,) reward of each step.
        values_T: (T,) value of each step's observation.
        gamma: discount for each step, in (0, 1].
        gae_lambda: weight of later surprises, in [0, 1]. 0 trusts the values alone; 1 trusts the outcome, less its value.
        terminated: whether the episode came to its end, after which nothing is earned. Where a limit cut it, the value of
            its last observation stands for that of the one after it.

    Returns:
        (T,) with entry t = surprise t + gamma * gae_lambda * entry t + 1, and surprise t = reward t + gamma * value t + 1
        - value t.
    """
    following = np.append(values_T[1:], 0.0 if terminated else values_T[-1:])
    surprises = rewards_T + gamma * following - values_T
    result = np.empty(len(rewards_T), dtype=np.float64)
    advantage = 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        advantage = surprises[t] + gamma * gae_lambda * advantage
        result[t] = advantage
    return result


def scale_by_std(advantages: Sequence[Array], eps: float = 1e-6) -> list[Array]:
    """Divide by the standard deviation over all entries; no mean is subtracted, so signs are kept.

    Pass a whole batch for one scale over the batch, or the arrays of one group for a scale of its own.

    Args:
        advantages: arrays of any lengths, without NaN.
        eps: standard deviation below which there is no scale to divide by.

    Returns:
        New arrays of the same shapes. Where the (population) standard deviation is below eps they are unchanged: a
        batch without a signal stays at 0 instead of having its rounding errors blown up.
    """
    arrays = [np.array(values, dtype=np.float64) for values in advantages]
    entries = sum(values.size for values in arrays)
    std = float(np.concatenate(arrays).std()) if entries else 0.0
    return arrays if std < eps else [values / std for values in arrays]


def flat_group_cause(returns_G: Array, failed_G: NDArray[np.bool_], invalid_share: float) -> FlatCause | None:
    """Why a group gives no signal, or None when its returns differ.

    Args:
        returns_G: (G,) returns that the advantages are made of; NaN marks a member that cannot be graded. For
            return-to-go advantages pass the bootstrapped return-to-go of the first step, which tells a failure from a
            limit at the same step.
        failed_G: (G,) whether a failure ended the member, as opposed to a success or a limit.
        invalid_share: share of the group's steps whose reply was no action, in [0, 1].

    Returns:
        None: at least two graded members differ by more than rounding.
        "all_invalid": every step of every member was invalid.
        "all_solved": no graded member failed.
        "all_failed": every graded member failed, with equal returns.
        "mixed_ends": some failed and some did not, and the returns are equal nonetheless.
        "ungraded": no member could be graded.
    """
    returns_G = np.asarray(returns_G, dtype=np.float64)
    graded = ~np.isnan(returns_G)
    if not graded.any():
        return "ungraded"
    returns = returns_G[graded]
    # Equal rewards summed in another order differ in the last bits.
    if np.ptp(returns) > 1e-9 * max(1.0, float(np.abs(returns).max())):
        return None
    if invalid_share >= 1.0:
        return "all_invalid"
    failed = np.asarray(failed_G, dtype=bool)[graded]
    if not failed.any():
        return "all_solved"
    return "all_failed" if failed.all() else "mixed_ends"
