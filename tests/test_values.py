"""Values that are fitted to the other groups: what they find, what they must not know, and where they give up."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_agents.rl.values import cross_fitted_values, explained_variance


def a_track(steps: int = 2000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places on a track that is dangerous near both ends, their worth with noise, and folds of a hundred steps."""
    rng = np.random.default_rng(seed)
    places = rng.uniform(-1.0, 1.0, size=(steps, 3))
    worth = 10.0 - 8.0 * places[:, 0] ** 2 + rng.normal(scale=0.5, size=steps)
    return places, worth, np.arange(steps) // 100


def test_danger_at_both_ends_is_found() -> None:
    places, worth, folds = a_track()
    values = cross_fitted_values(places, worth, folds)
    assert explained_variance(values, worth) > 0.8  # the noise is 4% of the variance; a line explains nothing


def test_a_fold_does_not_know_its_own_outcomes() -> None:
    places, worth, folds = a_track()
    other = np.where(folds == 3, -1000.0, worth)
    before, after = (cross_fitted_values(places, outcome, folds) for outcome in (worth, other))
    np.testing.assert_allclose(after[folds == 3], before[folds == 3], rtol=1e-9)
    assert not np.allclose(after[folds == 4], before[folds == 4])


def test_the_order_of_steps_does_not_matter() -> None:
    places, worth, folds = a_track()
    order = np.random.default_rng(1).permutation(len(worth))
    np.testing.assert_allclose(
        cross_fitted_values(places[order], worth[order], folds[order]),
        cross_fitted_values(places, worth, folds)[order],
        rtol=1e-8,
    )


def test_noise_is_not_taken_for_worth() -> None:
    places, worth, folds = a_track(steps=1000)
    shuffled = np.random.default_rng(2).permutation(worth)
    assert -0.25 < explained_variance(cross_fitted_values(places, shuffled, folds), shuffled) < 0.1


@pytest.mark.parametrize("observations", [np.zeros((4, 0)), np.ones((4, 5))])
def test_where_nothing_is_seen_a_fold_is_worth_what_the_others_earned(observations: np.ndarray) -> None:
    values = cross_fitted_values(observations, np.array([1.0, 3.0, 10.0, 20.0]), np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(values, [15.0, 15.0, 2.0, 2.0])


def test_a_single_fold_has_nothing_to_be_judged_by() -> None:
    places, worth, _ = a_track(steps=50)
    np.testing.assert_array_equal(cross_fitted_values(places, worth, np.zeros(50, dtype=int)), 0.0)


def test_explained_variance_by_hand() -> None:
    returns = np.array([0.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 7.0), returns) == 0.0
    assert np.isnan(explained_variance(returns, np.ones(3)))
