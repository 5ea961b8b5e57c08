"""`python -m grpo_agents.train`: its exit statuses and everything a run writes down."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from doors import LONG, ROOT, TINY, command, environment, lines, long_run, result, train_here
from PIL import Image

from grpo_agents.config import TrainConfig
from grpo_agents.rl.advantages import FlatCause
from grpo_agents.run.config import load_yaml, parse, to_yaml
from grpo_agents.run.metrics import alarms_by_key


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_run(tmp_path_factory)[0]


def test_a_run_that_ends_as_asked_says_so_and_nothing_on_stderr(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, done = long_run(tmp_path_factory)
    for words in ("stopped: limit of 4 updates", "Return on held-out seeds", "random", "untrained", "trained"):
        assert words in done.stdout
    assert done.stdout.endswith("written to runs/long\n")
    assert done.stderr == ""


def test_the_summary_compares_three_policies_on_the_same_held_out_seeds(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for policy in ("random", "untrained", "trained"):
        row = summary[policy]
        assert row["ci_low"] <= row["mean"] <= row["ci_high"]
        assert row["episodes"] == 4
    assert summary["env_steps"] == lines(run)[-1]["env_steps"]
    assert summary["wall_s"] > 0
    assert (summary["solved"], summary["seed"], summary["updates"]) == (False, 0, 4)
    assert {"python", "torch", "transformers", "peft", "gymnasium", "grpo_agents"} <= summary["versions"].keys()
    assert len(set(summary["seeds"]["held_out"])) == 4
    assert not set(summary["seeds"]["held_out"]) & set(summary["seeds"]["validation"])


def test_the_best_adapter_is_that_of_the_best_validation_the_one_at_the_end_included(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    scheduled = {line["update"]: line["validation/mean"] for line in lines(run) if "validation/mean" in line}
    assert scheduled.keys() == {3}
    assert summary["best_update"] in (3, 4)
    assert summary["best_validation"] >= scheduled[3]
    best = run / "checkpoints" / f"update_{summary['best_update']:06d}" / "adapter" / "adapter_model.safetensors"
    assert (run / "best" / "adapter_model.safetensors").read_bytes() == best.read_bytes()


def test_the_configuration_is_read_back_as_it_was(run: Path) -> None:
    config = load_yaml(TrainConfig, run / "config.yaml")
    assert config == parse(TrainConfig, [*LONG, "name=long"], prog="train", summary="")
    assert to_yaml(config) == (run / "config.yaml").read_text()


def test_each_line_of_metrics_says_what_a_reader_needs_to_trust_an_update(run: Path) -> None:
    assert [line["update"] for line in lines(run)] == [1, 2, 3, 4]
    numbers = {
        "groups/flat", "actions/invalid", "truncation", "clip_fraction", "ratio/mean", "ratio/max", "ratio/ess", "kl",
        "entropy", "loss", "grad_norm", "mismatch", "env_steps", "return/mean", "return/p10", "return/p90",
        "time/play", "time/sample", "time/update", "time/sync", "time/wall", "time/steps_per_second",
    }  # fmt: skip
    for line in lines(run):
        assert numbers <= line.keys()
        assert all(np.isfinite(line[key]) for key in numbers)
        causes = [f"groups/{cause}" for cause in get_args(FlatCause)]
        assert sum(line.get(cause, 0) for cause in causes) == line["groups/flat"] * 2
        assert line["end/fault"] == line["faults"] == 0
        assert line["ratio/ess"] <= 1 + 1e-9
        assert line["mismatch"] < 1e-4  # float32 log-probabilities of two batch sizes
    assert lines(run)[1]["restart/length"] > 0


def test_the_alarms_watch_numbers_that_a_run_really_writes(run: Path) -> None:
    line = {**lines(run)[-1], "groups/flat": 1.0, "actions/invalid": 1.0, "truncation": 1.0, "kl": 99.0}
    line |= {"ratio/max": 99.0, "ratio/ess": 0.01, "entropy": 0.0}
    assert alarms_by_key(line).keys() <= lines(run)[-1].keys()
    assert len(alarms_by_key(line)) == 7


def test_tensorboard_shows_the_numbers_of_the_metrics(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    written = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    for line in lines(run):
        for key, value in line.items():
            assert written[key][line["update"]] == np.float32(value)


@pytest.mark.parametrize("name", ["return_curve.png", "return_histograms.png"])
def test_the_pictures_have_their_size_and_are_not_blank(run: Path, name: str) -> None:
    with Image.open(run / name) as picture:
        assert picture.size == (1080, 612)
        pixels = np.asarray(picture.convert("RGB"))
    assert 0.01 < (pixels != 255).any(axis=-1).mean() < 0.9


def test_the_best_adapter_is_loaded_by_peft_without_code_of_this_project(run: Path) -> None:
    from grpo_agents.policies.torchvision_ops import register_missing_ops

    register_missing_ops()  # transformers imports torchvision, which does not load beside a CPU build of torch otherwise

    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(str(ROOT / "assets" / "tiny-qwen-vl"))
    model = PeftModel.from_pretrained(base, str(run / "best"))
    saved = load_file(run / "best" / "adapter_model.safetensors")
    loaded = {name.replace(".default", ""): value for name, value in model.state_dict().items() if "lora_" in name}
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert any(value.any() for name, value in saved.items() if "lora_B" in name)


def test_two_equal_runs_are_equal_to_the_byte(run: Path, tmp_path: Path) -> None:
    assert train_here(tmp_path, *LONG, "name=again") == 0
    assert result(tmp_path / "runs" / "again") == result(run)


def test_without_updates_the_untrained_model_is_evaluated(tmp_path: Path) -> None:
    assert train_here(tmp_path, *TINY, "updates=0", "name=untrained") == 0
    summary = json.loads((tmp_path / "runs" / "untrained" / "summary.json").read_text())
    assert {"random", "untrained"} <= summary.keys()
    assert "trained" not in summary
    assert (summary["env_steps"], summary["updates"], summary["best_validation"]) == (0, 0, None)


def test_all_wrong_settings_are_reported_at_once_before_torch_is_imported(tmp_path: Path) -> None:
    stub = tmp_path / "stubs"
    stub.mkdir()
    for name in ("torch", "transformers", "gymnasium"):
        (stub / f"{name}.py").write_text("raise SystemExit('imported too early')\n")
    words = ["group.size=1", "learner.lr=fast", "smapler=local", "updates=-1"]
    done = command("train", *words, folder=tmp_path, PYTHONPATH=f"{stub}:{ROOT}")
    assert done.returncode == 2
    assert done.stdout == ""
    heads = [line.split(":")[0].split(";")[0].strip() for line in done.stderr.splitlines()]
    assert heads == [
        "error",
        "- unknown setting 'smapler'",
        "- learner.lr=fast",
        "- updates=-1",
        "- group.size=1",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_failure_has_status_1_and_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "falling.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Falling(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        raise OSError('the simulator is gone')\n"
        "gym.register('Falling-v0', Falling, max_episode_steps=500)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert train_here(tmp_path, *TINY, "env=falling:Falling-v0", "group.start=reset", "name=falling") == 1
    assert "the simulator is gone" in capsys.readouterr().err
    assert (tmp_path / "runs" / "falling" / "checkpoints" / "update_000000").is_dir()


def test_ctrl_c_stops_with_status_130_and_says_how_to_go_on(run: Path, tmp_path: Path) -> None:
    """The line that the command prints does go on, to the very result of a run that was never stopped."""
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_agents.train", *LONG, "name=stopped"],
        cwd=tmp_path,
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stopped = tmp_path / "runs" / "stopped"
    try:
        wait_for_line(stopped / "metrics.jsonl", process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err == ""
    assert out.endswith("Go on with:\n  python -m grpo_agents.train resume=runs/stopped\n")
    assert not (stopped / "summary.json").exists()
    assert train_here(tmp_path, "resume=runs/stopped") == 0
    assert result(stopped) == result(run)


def wait_for_line(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not (path.exists() and path.read_bytes().endswith(b"\n")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} has no line yet"
        time.sleep(0.02)
