"""Numbers that go into tables: means with bootstrap intervals, and latencies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CHUNK = 1_000_000
"""Values drawn at once while resampling: about 16 MB whatever the number of episodes."""


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron 1979): quantiles of the means of resamples with replacement.

    Args:
        values: N observations, N at least 1.
        confidence: share of the resampled means inside the interval, above 0 and below 1.
        resamples: number of resamples.
        seed: of the resampling; equal arguments give equal intervals.

    Returns:
        (low, high). Both equal the mean when all values are equal.

    Raises:
        ValueError: no values, a value that is not finite, or a confidence outside (0, 1).
    """
    data = _checked(values)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: must be above 0 and below 1")
    if data.min() == data.max():
        return float(data[0]), float(data[0])
    rng = np.random.default_rng(seed)
    rows = max(1, CHUNK // data.size)
    means = np.concatenate(
        [
            data[rng.integers(data.size, size=(min(rows, resamples - start), data.size))].mean(axis=1)
            for start in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def summarize(returns: Sequence[float]) -> dict[str, float | int]:
    """One row of a result table.

    Args:
        returns: undiscounted returns of N episodes, N at least 1.

    Returns:
        mean, ci_low and ci_high (95% bootstrap interval of the mean), episodes (N), std (of the sample, N - 1 in the
        denominator; 0 for one episode), min, max, median.

    Raises:
        ValueError: no returns, or one that is not finite.
    """
    data = _checked(returns)
    low, high = bootstrap_interval(returns)
    return {
        "mean": float(data.mean()),
        "ci_low": low,
        "ci_high": high,
        "episodes": int(data.size),
        "std": float(data.std(ddof=1)) if data.size > 1 else 0.0,
        "min": float(data.min()),
        "max": float(data.max()),
        "median": float(np.median(data)),
    }


def latency_summary(seconds: Sequence[float]) -> dict[str, float | int]:
    """Median and 95th percentile of durations.

    Args:
        seconds: N durations in seconds, N at least 1.

    Returns:
        median_ms and p95_ms in milliseconds, n (N).

    Raises:
        ValueError: no durations, or one that is not finite.
    """
    data = _checked(seconds) * 1000
    median, p95 = np.quantile(data, [0.5, 0.95])
    return {"median_ms": float(median), "p95_ms": float(p95), "n": int(data.size)}


def _checked(values: Sequence[float]) -> NDArray[np.float64]:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0:
        raise ValueError(f"expected a list of at least one number, got shape {data.shape}")
    if not np.isfinite(data).all():
        raise ValueError(f"{int((~np.isfinite(data)).sum())} of {data.size} values are not finite")
    return data
