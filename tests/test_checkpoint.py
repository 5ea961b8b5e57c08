"""A run's folder: whole files only, whatever stops the writing, and a best adapter that belongs to its checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_agents.errors import CheckpointError, ConfigError
from grpo_agents.run.checkpoint import RunFolder


def weights(value: int) -> Callable[[Path], None]:
    """Writes an adapter whose one number is `value`."""

    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file({"w": np.array([value])}, folder / "adapter_model.safetensors")

    return save


def value(folder: Path) -> int:
    return int(load_file(folder / "adapter_model.safetensors")["w"][0])


def save(folder: RunFolder, update: int, keep: int = 2) -> None:
    folder.save_checkpoint(update, weights(update), lambda path: path.write_text(str(update)), keep)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create("run", tmp_path)
    made.write_text("config.yaml", "seed: 0\n")
    return made


def killed(work: Callable[[], Any]) -> bool:
    """Do the work in a child process; whether SIGKILL ended it."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_at(calls: int) -> Callable[..., Any]:
    """A tracer for `sys.setprofile` that kills the process at a call of the operating system's renames and removals."""
    left = [calls]

    def trace(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") in ("rename", "replace", "rmdir", "unlink", "fsync"):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    return trace


def test_a_new_run_needs_a_new_name(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"name=run: .*run exists\. Choose another name, or .*resume=.*run"):
        RunFolder.create("run", folder.path.parent)


def test_a_folder_that_a_kill_left_empty_is_new(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml.partial").write_text("se")
    assert RunFolder.create("run", tmp_path).path == tmp_path / "run"


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"is no run folder: it has no config\.yaml"):
            RunFolder.open(str(path))


def test_the_newest_checkpoints_are_kept_in_order(folder: RunFolder) -> None:
    assert folder.newest_checkpoint() is None
    for update in (1, 2, 10):
        save(folder, update)
    assert [update for update, _ in folder.checkpoints()] == [2, 10]
    assert folder.newest_checkpoint() == folder.checkpoint(10)


def test_a_kill_at_any_rename_leaves_the_old_best_adapter_or_the_new_one(folder: RunFolder) -> None:
    save(folder, 1)
    folder.save_best(weights(1))
    seen, step, was_killed = [], 0, True
    while was_killed:
        step += 1
        copy = RunFolder(folder.path.with_name(f"copy{step}"))
        shutil.copytree(folder.path, copy.path)

        def work(copy: RunFolder = copy, step: int = step) -> None:
            sys.setprofile(kill_at(step))
            copy.save_best(weights(2))
            sys.setprofile(None)

        was_killed = killed(work)
        copy.recover_best(1)
        seen.append(value(copy.best))
        copy.save_best(weights(3))
        assert value(copy.best) == 3
        assert sorted(os.listdir(copy.path)) == ["best", "checkpoints", "config.yaml"]
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    assert len(seen) > 4


def test_a_kill_at_any_point_of_a_checkpoint_leaves_a_whole_newest_one(folder: RunFolder) -> None:
    save(folder, 1)
    save(folder, 2)
    step, was_killed = 0, True
    while was_killed:
        step += 1
        copy = RunFolder(folder.path.with_name(f"copy{step}"))
        shutil.copytree(folder.path, copy.path)

        def work(copy: RunFolder = copy, step: int = step) -> None:
            sys.setprofile(kill_at(step))
            save(copy, 3)
            sys.setprofile(None)

        was_killed = killed(work)
        newest = copy.newest_checkpoint()
        assert newest is not None
        update = copy.checkpoints()[-1][0]
        assert (newest / "state.pt").read_text() == str(update)
        assert value(newest / "adapter") == update
        save(copy, update + 1)
        assert [number for number, _ in copy.checkpoints()] == [update, update + 1]
    assert update == 3


def test_the_validation_at_the_end_is_forgotten_by_a_run_that_goes_on(folder: RunFolder) -> None:
    save(folder, 4)
    folder.save_best(weights(4))
    save(folder, 6)
    folder.save_best(weights(6), end_of=6)
    assert value(folder.best) == 6
    folder.recover_best(4)
    assert value(folder.best) == 4
    folder.recover_best(4)
    assert value(folder.best) == 4
    assert sorted(os.listdir(folder.checkpoint(6))) == ["adapter", "state.pt"]


def test_a_run_that_had_no_best_adapter_goes_on_without_one(folder: RunFolder) -> None:
    save(folder, 2)
    folder.save_best(weights(2), end_of=2)
    folder.recover_best(0)
    assert not folder.best.exists()


def _full(*args: Any, **kwargs: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_what_was_saved_before_whole(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, 1)
    folder.save_best(weights(1))
    folder.write_json("summary.json", {"a": 1})
    before = sorted(folder.path.rglob("*"))
    writes: dict[str, Callable[[], None]] = {
        "update_000002": lambda: folder.save_checkpoint(2, weights(2), _full, 2),
        "best": lambda: folder.save_best(weights(2)),
        "summary.json": lambda: folder.write_json("summary.json", {"a": 2}),
    }
    monkeypatch.setattr(os, "fsync", _full)
    for name, write in writes.items():
        with pytest.raises(CheckpointError, match=rf"{name} could not be written: .*No space left.* MB are free there"):
            write()
    assert sorted(folder.path.rglob("*")) == before
    assert (value(folder.best), folder.read_json("summary.json")) == (1, {"a": 1})


@pytest.mark.parametrize("damage", ["cut", "empty", "absent"])
def test_a_damaged_adapter_is_named_with_what_to_do(folder: RunFolder, damage: str) -> None:
    save(folder, 1)
    save(folder, 2)
    path = folder.checkpoint(2) / "adapter" / "adapter_model.safetensors"
    if damage == "absent":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1 if damage == "cut" else 0)
    with pytest.raises(CheckpointError, match=r"update_000002 cannot be read back: .* Remove that folder to go on"):
        folder.newest_checkpoint()
    shutil.rmtree(folder.checkpoint(2))
    assert folder.newest_checkpoint() == folder.checkpoint(1)
