"""The short form of the learning run: it has to beat the untrained model with disjoint intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_agents.config import TrainConfig
from grpo_agents.run.checkpoint import RunFolder
from grpo_agents.run.config import parse, to_yaml


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cartpole_is_learned_from_frames(tmp_path: Path) -> None:
    from grpo_agents.train import train

    words = ["env=CartPole-v1", "name=short", "env_steps=30000", "episodes=30", "eval.episodes=16", "policy.device=cpu"]
    config = parse(TrainConfig, words, prog="train", summary="")
    folder = RunFolder.create("short", tmp_path)
    folder.write_text("config.yaml", to_yaml(config))
    summary = train(config, folder)
    assert summary["trained"]["ci_low"] > summary["untrained"]["ci_high"]
    assert summary["trained"]["ci_low"] > summary["random"]["ci_high"]
    assert json.loads((folder.path / "summary.json").read_text())["env_steps"] == summary["env_steps"]
