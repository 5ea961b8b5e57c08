"""Table numbers against values computed by other means."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_agents.run.statistics import bootstrap_interval, latency_summary, summarize


def test_the_interval_of_two_values_is_the_binomial_one() -> None:
    # The sum of 16 resampled zeros and ones is Binomial(16, 1/2), whose 2.5% and 97.5% quantiles are 4 and 12.
    low, high = bootstrap_interval([0.0, 1.0] * 8)
    assert (low, high) == (4 / 16, 12 / 16)


def test_the_interval_is_about_the_normal_one_for_many_values() -> None:
    values = np.random.default_rng(5).normal(10, 2, size=400)
    half = 1.96 * values.std() / math.sqrt(400)
    low, high = bootstrap_interval(list(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    narrow = bootstrap_interval(list(values), confidence=0.5)
    assert low < narrow[0] < values.mean() < narrow[1] < high


def test_the_interval_is_repeatable_whatever_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0, 5.0, 2.0, 8.0, 4.0]
    first = bootstrap_interval(values)
    assert bootstrap_interval(values) == first
    monkeypatch.setattr("grpo_agents.run.statistics.CHUNK", 50)
    assert bootstrap_interval(values) == pytest.approx(first, abs=0.1)
    assert bootstrap_interval([500.0] * 100) == (500.0, 500.0)


def test_a_summary_holds_the_plain_statistics() -> None:
    row = summarize([1, 2, 3, 10])
    assert {k: row[k] for k in ("mean", "episodes", "min", "max", "median")} == {
        "mean": 4.0, "episodes": 4, "min": 1.0, "max": 10.0, "median": 2.5,
    }  # fmt: skip
    assert row["std"] == pytest.approx(math.sqrt((9 + 4 + 1 + 36) / 3))
    assert 1.0 <= row["ci_low"] < 4.0 < row["ci_high"] <= 10.0
    assert summarize([7.0])["std"] == 0.0


def test_latencies_are_in_milliseconds() -> None:
    seconds = [0.001 * n for n in range(1, 102)]
    assert latency_summary(seconds) == pytest.approx({"median_ms": 51.0, "p95_ms": 96.0, "n": 101})


def test_nothing_and_nan_are_refused() -> None:
    for values, message in (([], "at least one"), ([1.0, math.nan], "1 of 2 values are not finite")):
        with pytest.raises(ValueError, match=message):
            summarize(values)
