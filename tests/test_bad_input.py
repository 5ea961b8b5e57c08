"""What is wrong is answered with its name, its likely cause and the fix, and leaves nothing behind."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from doors import LONG, ROOT, TINY, long_run, result, train_here
from safetensors.numpy import load_file, save_file

TINY_MODEL = ROOT / "assets" / "tiny-qwen-vl"
WORLDS = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Blind(CartPoleEnv):
    metadata = {"render_modes": ["human"], "render_fps": 50}

    def __init__(self, render_mode=None):
        super().__init__(None)

gym.register("Blind-v0", Blind, max_episode_steps=50)
"""


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error of a command with a wrong setting, which has left no run behind."""
    before = sorted((folder / "runs").rglob("*"))
    assert train_here(folder, *TINY, "updates=1", *words) == 2
    assert sorted((folder / "runs").rglob("*")) == before
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.err


def test_an_unknown_environment_comes_with_the_one_that_was_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(tmp_path, capsys, "env=CartPol-v1", "name=x")
    assert "there is no environment 'CartPol-v1'; did you mean CartPole-v1" in error
    assert "no environment" in refused(tmp_path, capsys, "env=CartPol-v1", "name=x")  # the name is free again


def test_an_environment_that_cannot_be_rendered_says_what_to_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blindness.py").write_text(WORLDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    error = refused(tmp_path, capsys, "env=blindness:Blind-v0")
    assert "cannot be rendered to pictures: its render modes are ['human']" in error
    assert 'Add "rgb_array" to its metadata["render_modes"]' in error


def test_a_model_folder_without_a_processor_says_how_to_save_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model, ignore=shutil.ignore_patterns("*processor*"))
    error = refused(tmp_path, capsys, f"policy={model}")
    assert f"{model} has no processor (processor_config.json or preprocessor_config.json)" in error
    assert "save_pretrained" in error


def test_a_model_that_is_not_there_says_what_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(tmp_path, capsys, "policy=./no-model")
    assert "policy.model=./no-model: there is no such folder" in error
    assert "Use 'tiny', a folder, or a name such as" in error


def test_a_name_that_exists_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("seed: 7\n")
    error = refused(tmp_path, capsys, "name=mine")
    assert "name=mine: runs/mine exists. Choose another name, or go on with that run: resume=runs/mine" in error
    assert (tmp_path / "runs" / "mine" / "config.yaml").read_text() == "seed: 7\n"


def test_a_misspelt_key_of_an_experiment_file_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("env: CartPole-v1\ngroup:\n  count: 4\n  sizes: 8\n")
    error = refused(tmp_path, capsys, f"experiment={path}")
    assert f"{path} line 4: unknown setting 'group.sizes'; did you mean 'group.size'?" in error


def test_a_group_of_one_has_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "set group.size to 2 or more" in refused(tmp_path, capsys, "group.size=1")


def test_a_checkpoint_of_another_base_model_is_refused_and_kept(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(long_run(tmp_path_factory)[0], tmp_path / "runs" / "long"))
    other = Path(shutil.copytree(TINY_MODEL, tmp_path / "other-model"))
    weights = load_file(other / "model.safetensors")
    save_file({name: value + 0.01 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"})
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("model: tiny", f"model: {other}"))
    assert train_here(tmp_path, "resume=runs/long", "updates=5") == 2
    error = capsys.readouterr().err
    assert "checkpoints/update_000004/adapter" in error
    assert f"was trained on {TINY_MODEL}" in error
    assert str(other) in error
    assert (run / "checkpoints" / "update_000004" / "state.pt").is_file()


def test_action_words_may_be_the_beginnings_of_one_another(tmp_path: Path) -> None:
    """The reply ends with the end-of-turn token, so "go" and "gone" are told apart by what follows "go"."""
    words = ["env.actions=go,gone", "updates=1", "eval.every=0", "name=prefixes"]
    assert train_here(tmp_path, *TINY, *words) == 0
    assert (tmp_path / "runs" / "prefixes" / "summary.json").is_file()


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Within this context no file can grow beyond `size` bytes, as on a disk that is full: writes fail half done."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_run_but_nothing_that_was_saved(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = long_run(tmp_path_factory)[0]
    assert train_here(tmp_path, *LONG, "updates=1", "name=full") == 0
    adapter = (whole / "best" / "adapter_model.safetensors").stat().st_size
    for size in (adapter - 1, adapter + 1):  # fails at the adapter, and at the state of the optimizer behind it
        with room_for(size):
            assert train_here(tmp_path, "resume=runs/full", "updates=4") == 1
        error = capsys.readouterr().err
        assert "error: runs/full/checkpoints/update_000002 could not be written: " in error
        assert error.endswith("what was saved before is whole, and resume= goes on from it once there is room\n")
    assert train_here(tmp_path, "resume=runs/full") == 0
    assert result(tmp_path / "runs" / "full") == result(whole)
