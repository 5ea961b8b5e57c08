"""What each observation is worth, judged by the play of other groups: the baseline of the `gae` advantage.

There is no critic network and nothing is kept from one update to the next. For each group a regression of the
return-to-go on what was seen is fitted to the steps of all other groups of the update (cross-fitting, as in Chernozhukov
et al., Econometrics Journal 2018), so that no estimate has seen the outcome it is compared with. The regression is linear
in random rectified features (Rahimi and Recht, NeurIPS 2008), which is enough to say that a cart near either end of its
track is in danger, and is solved exactly.

Notation in shapes: T steps of an episode, N steps in all, F numbers of an observation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_agents.rl.advantages import Array

UNITS = 256
"""Random features. More of them fit an update of a few thousand steps worse, not better."""
_RIDGE = 0.05
"""Penalty on the squared weights of standardised features, in units of the number of steps."""
_SPREAD = 1.5
"""Standard deviation of the random directions: how strongly a unit bends within the spread of the observations."""


def cross_fitted_values(observations_NF: NDArray[np.floating], returns_N: Array, folds_N: NDArray[np.int64]) -> Array:
    """Expected return-to-go of each step's observation, estimated from the steps of the other folds.

    Args:
        observations_NF: (N, F) what was seen. F may be 0: then a fold's estimate is the mean of the others.
        returns_N: (N,) discounted returns-to-go.
        folds_N: (N,) the fold of each step; steps that depend on each other belong to one.

    Returns:
        (N,) estimates. With a single fold there is nothing to judge it by, and they are 0.
    """
    features = _standardized(_rectified(_standardized(np.asarray(observations_NF, dtype=np.float64))))
    folds = np.unique(folds_N)
    # Sums over all steps less those of a fold are sums over the others: each step is multiplied out once.
    moments = {fold: _moments(features[folds_N == fold], returns_N[folds_N == fold]) for fold in folds}
    whole: list[Any] = [sum(parts) for parts in zip(*moments.values(), strict=True)]
    values = np.zeros(len(returns_N))
    for fold in folds if len(folds) > 1 else ():
        count, total, products, correlations, sums = (a - b for a, b in zip(whole, moments[fold], strict=True))
        center = total / count
        means = sums / count
        covariance = products - count * np.outer(means, means)
        covariance[np.diag_indices_from(covariance)] += _RIDGE * count
        weights = np.linalg.solve(covariance, correlations - sums * center)
        own = folds_N == fold
        values[own] = center + (features[own] - means) @ weights
    return values


def explained_variance(values_N: Array, returns_N: Array) -> float:
    """Share of the variance of the returns that the values foretell: 1 at best, 0 for a constant, NaN without variance."""
    variance = float(returns_N.var())
    return 1.0 - float(np.var(returns_N - values_N)) / variance if variance > 0 else float("nan")


def _moments(features: Array, returns: Array) -> tuple[float, float, Array, Array, Array]:
    return float(len(returns)), float(returns.sum()), features.T @ features, features.T @ returns, features.sum(0)


def _standardized(columns: Array) -> Array:
    """Each column with mean 0 and standard deviation 1; one that does not vary is 0."""
    if not len(columns):
        return columns
    centered = columns - columns.mean(0)
    spread = centered.std(0)
    return centered / np.where(spread > 1e-6, spread, np.inf)


def _rectified(standardized: Array) -> Array:
    directions, offsets = _random_units(standardized.shape[1])
    return np.maximum(standardized @ directions + offsets, 0.0)


@lru_cache(maxsize=4)
def _random_units(count: int) -> tuple[Array, Array]:
    """Directions (F, UNITS) and offsets (UNITS,), the same in all runs and processes; no units for F = 0."""
    units = UNITS if count else 0
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, units)) * (_SPREAD / max(count, 1) ** 0.5), rng.normal(size=units)
