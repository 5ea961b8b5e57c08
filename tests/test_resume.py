"""Stopping and going on: k updates, a stop of any kind and N-k more are N updates, bit for bit."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doors import LONG, environment, lines, long_run, result, train_here

from grpo_agents.config import TrainConfig
from grpo_agents.run.config import load_yaml


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of four updates without a stop."""
    return result(long_run(tmp_path_factory)[0])


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same settings that ended after two updates."""
    folder = tmp_path_factory.mktemp("half")
    assert train_here(folder, *LONG, "updates=2", "name=half") == 0
    return folder / "runs" / "half"


@pytest.fixture
def stopped(half: Path, tmp_path: Path) -> Path:
    """A copy of the half run."""
    return Path(shutil.copytree(half, tmp_path / "runs" / "half"))


def test_k_updates_and_the_rest_are_all_updates_bit_for_bit(stopped: Path, whole: dict[str, Any]) -> None:
    # The run that ended validated its last update, which one that goes on does not; and it has states to restart from.
    assert (stopped / "best").is_dir()
    assert "validation/mean" not in lines(stopped)[-1]
    assert lines(stopped)[-1]["restart_pool"] > 0
    assert train_here(stopped.parent.parent, "resume=runs/half", "updates=4") == 0
    assert result(stopped) == whole
    assert updates_on_tensorboard(stopped) == [1, 2, 3, 4]


def updates_on_tensorboard(run: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(run / "tensorboard")).Reload().Scalars("loss")]


def test_the_limits_given_to_a_resume_hold_for_the_next_one_too(stopped: Path) -> None:
    words = ["resume=runs/half", "updates=2", "episodes=5", "env_steps=9000"]
    assert train_here(stopped.parent.parent, *words) == 0
    config = load_yaml(TrainConfig, stopped / "config.yaml")
    assert (config.updates, config.episodes, config.env_steps) == (2, 5, 9000)
    # The random and the untrained policy are played on the same seeds as the trained one.
    rows = result(stopped)["summary"]
    assert [rows[policy]["episodes"] for policy in ("random", "untrained", "trained")] == [5, 5, 5]


@pytest.mark.parametrize("word", ["seed=3", "learner.lr=1e-4", "env=Acrobot-v1", "name=other"])
def test_other_settings_beside_resume_are_refused(stopped: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(stopped.parent.parent, "resume=runs/half", word) == 2
    section = word.partition("=")[0].partition(".")[0]
    assert f"goes on with the settings in that folder, so {section} cannot be set beside it" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(tmp_path, "resume=runs/nothing") == 2
    assert "runs/nothing is no run folder: it has no config.yaml" in capsys.readouterr().err


KILLS = {
    "while playing": ("grpo_agents.envs.prompt_env", "PromptEnv.step", 30, False),
    "in the middle of a line of metrics": ("os", "write", 1, True),
    "between metrics and checkpoint": ("grpo_agents.run.checkpoint", "RunFolder.save_checkpoint", 1, False),
    "in the middle of a checkpoint": ("torch", "save", 1, True),
}
"""Where a process that goes on after update 2 is killed: module, function, number of its call, and whether its work is half done."""


@pytest.mark.parametrize("moment", KILLS)
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(
    stopped: Path, whole: dict[str, Any], moment: str
) -> None:
    module, function, call, half = KILLS[moment]
    folder = stopped.parent.parent
    child = os.fork()
    if not child:
        kill_in(module, function, call, half=half)
        os._exit(train_here(folder, "resume=runs/half", "updates=4"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert train_here(folder, "resume=runs/half") == 0
    assert result(stopped) == whole


def kill_in(module: str, function: str, call: int, *, half: bool) -> None:
    """Let a function kill this process when it is called the given number of times; half: with its work half done."""
    owner: Any = importlib.import_module(module)
    *path, name = function.split(".")
    for part in path:
        owner = getattr(owner, part)
    real: Callable[..., Any] = getattr(owner, name)
    left = [call]

    def killing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return real(*args, **kwargs)
        if half and module == "os":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        elif half:
            real(*args, **kwargs)
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, killing)


@pytest.mark.parametrize("damaged", ["state.pt", "adapter/adapter_model.safetensors"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(
    stopped: Path, damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(stopped / "checkpoints" / "update_000002" / damaged, 1000)
    assert train_here(stopped.parent.parent, "resume=runs/half", "updates=4") == 1
    error = capsys.readouterr().err
    assert "error: runs/half/checkpoints/update_000002 cannot be read back: " in error
    assert error.endswith(". Remove that folder to go on from the checkpoint before it\n")


def test_without_its_newest_checkpoint_a_run_goes_on_from_the_one_before(stopped: Path, whole: dict[str, Any]) -> None:
    shutil.rmtree(stopped / "checkpoints" / "update_000002")
    assert train_here(stopped.parent.parent, "resume=runs/half", "updates=4") == 0
    assert result(stopped) == whole


@pytest.mark.parametrize("ignored", [False, True], ids=["plain", "started in the background of a shell"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_what_is_awaited_and_has_the_status_of_shells(
    number: signal.Signals, status: int, ignored: bool, tmp_path: Path
) -> None:
    code = textwrap.dedent(
        """
        import asyncio, os, signal, sys
        from grpo_agents.run.command import run_command

        async def play():
            print("playing", flush=True)
            await asyncio.sleep(60)

        def main(argv):
            try:
                asyncio.run(play())
            except KeyboardInterrupt:
                print("said how to go on")
                raise

        if sys.argv[1:]:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(run_command(main))
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *(["ignored"] if ignored else [])],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "playing\n"
    process.send_signal(number)
    if ignored and number == signal.SIGINT:  # as the shell wanted it
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        status = 143
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (status, "said how to go on\n", "")
