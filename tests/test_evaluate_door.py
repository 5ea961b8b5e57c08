"""`python -m grpo_agents.evaluate`: the table again, how fast the agent acts, and three ways of watching it."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import chdir
from pathlib import Path

import av
import numpy as np
import pytest
from doors import command, long_run

from grpo_agents.run.command import run_command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = long_run(tmp_path_factory)[0]
    return Path(shutil.copytree(source, tmp_path_factory.mktemp("evaluate") / "runs" / "long"))


def evaluate_here(folder: Path, *words: str) -> int:
    """Evaluate in this process, as the command would in `folder`; returns its exit status."""
    from grpo_agents.evaluate import main

    with chdir(folder):
        return run_command(main, list(words))


def row(table: str, policy: str) -> list[str]:
    """The cells of one row of the printed table."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"│ {policy} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_table_of_the_run_is_found_again_with_the_latency(
    run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_here(run.parent.parent, "run=runs/long") == 0
    printed = capsys.readouterr().out
    trained = long_run(tmp_path_factory)[1].stdout
    for policy in ("random", "untrained", "trained"):
        assert row(printed, policy) == row(trained, policy)
    latency = re.search(r"action latency, one environment: median (\S+) ms, 95th percentile (\S+) ms", printed)
    assert latency
    assert 0 < float(latency[1]) <= float(latency[2])


def test_a_video_holds_a_frame_for_each_step_of_the_episode(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_here(run.parent.parent, "run=runs/long", "render=video", "episodes=1") == 0
    printed = capsys.readouterr().out
    assert "written to runs/long/evaluation.mp4" in printed
    with av.open(run / "evaluation.mp4") as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 50
    # A step of CartPole is worth 1, so the return counts the frames.
    assert len(frames) == float(row(printed, "trained")[1])
    assert frames[0].shape == (400, 920, 3)
    assert (frames[0] != frames[-1]).any()
    assert np.ptp(frames[0]) > 100


def test_a_terminal_into_a_pipe_is_plain_lines(run: Path) -> None:
    done = command("evaluate", "run=runs/long", "render=terminal", "episodes=1", folder=run.parent.parent)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    shown = re.findall(r"step (\d+)  return (\d+)  (left|right)  \(left 0\.\d\d, right 0\.\d\d\)", done.stdout)
    steps = [int(step) for step, _, _ in shown]
    assert steps == list(range(0, 10 * len(steps), 10))
    assert steps[-1] < float(row(done.stdout, "trained")[1]) <= steps[-1] + 10


def test_a_window_without_a_display_offers_the_other_two(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_here(run.parent.parent, "run=runs/long", "render=human") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: render=human: there is no display (")
    assert "Use render=video, which writes an MP4 file, or render=terminal" in error


def test_the_last_adapter_can_play_instead_of_the_best(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "runs" / "long")
    shutil.rmtree(tmp_path / "runs" / "long" / "checkpoints" / "update_000003")
    os.truncate(tmp_path / "runs" / "long" / "best" / "adapter_model.safetensors", 1000)
    assert evaluate_here(tmp_path, "run=runs/long", "adapter=best", "episodes=1") != 0
    assert evaluate_here(tmp_path, "run=runs/long", "adapter=last", "episodes=1") == 0


def test_what_is_no_run_and_what_is_no_setting_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_here(tmp_path, "run=runs/nothing") == 2
    assert "runs/nothing is no run folder" in capsys.readouterr().err
    assert evaluate_here(tmp_path, "rnu=runs/nothing", "render=viedo") == 2
    error = capsys.readouterr().err
    for words in ("did you mean 'run'?", "render=viedo: must be none | human | video | terminal", "run=... must be"):
        assert words in error


def test_a_run_without_updates_shows_the_untrained_model_as_such(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = tmp_path / "runs" / "fresh"
    shutil.copytree(run, fresh, ignore=shutil.ignore_patterns("best", "checkpoints"))
    assert evaluate_here(tmp_path, "run=runs/fresh") == 2
    assert "run=runs/fresh has no checkpoint yet; train it first: resume=runs/fresh" in capsys.readouterr().err
    (newest,) = sorted((run / "checkpoints").glob("update_*"))[-1:]
    shutil.copytree(newest, fresh / "checkpoints" / "update_000000")
    assert evaluate_here(tmp_path, "run=runs/fresh", "episodes=1") == 0
    assert "trained " not in capsys.readouterr().out.replace("untrained ", "")
