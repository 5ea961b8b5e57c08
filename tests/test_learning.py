"""The short form of the learning run: four updates have to beat the untrained model and chance with disjoint intervals."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors import result, train_here


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cartpole_is_learned_from_frames(tmp_path: Path) -> None:
    words = ("env=CartPole-v1", "policy.device=cpu", "name=short")
    limits = ("updates=4", "episodes=30", "eval.episodes=8", "eval.confirm=0")
    assert train_here(tmp_path, *words, *limits) == 0
    summary = result(tmp_path / "runs" / "short")["summary"]
    assert summary["trained"]["ci_low"] > summary["untrained"]["ci_high"]
    assert summary["trained"]["ci_low"] > summary["random"]["ci_high"]
