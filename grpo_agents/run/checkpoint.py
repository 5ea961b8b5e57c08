"""A run's folder and its checkpoints. Everything is written beside its place first and then renamed into it, so that a
kill at any moment leaves whole files only."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from grpo_agents.errors import CheckpointError, ConfigError

_NUMBERED = re.compile(r"update_(\d+)")


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what it writes.

    config.yaml, metrics.jsonl, summary.json, baselines.json, two pictures, tensorboard/, best/ (the adapter with the best
    validation), checkpoints/update_000012/ (adapter/ and state.pt; at the end of a run also best/, see `save_best`),
    skipped/ (minibatches with a non-finite gradient).
    """

    path: Path

    @classmethod
    def create(cls, name: str, root: Path = Path("runs")) -> RunFolder:
        """Make a new folder. One that a kill left before anything was written into it counts as new.

        Raises:
            ConfigError: it exists.
        """
        path = root / name
        try:
            path.mkdir(parents=True, exist_ok=path.is_dir() and set(os.listdir(path)) <= {"config.yaml.partial"})
        except FileExistsError:
            raise ConfigError(
                [f"name={name}: {path} exists. Choose another name, or go on with that run: resume={path}"]
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be made: {error}") from error
        return cls(path)

    @classmethod
    def open(cls, path: str) -> RunFolder:
        """An existing run.

        Raises:
            ConfigError: the folder holds no run.
        """
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise ConfigError([f"{path} is no run folder: it has no config.yaml. Runs are the folders under runs/"])
        return folder

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def best(self) -> Path:
        return self.path / "best"

    def checkpoint(self, update: int) -> Path:
        return self.path / "checkpoints" / f"update_{update:06d}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """All whole checkpoints, oldest first."""
        found = []
        for path in (self.path / "checkpoints").glob("update_*"):
            match = _NUMBERED.fullmatch(path.name)
            if match:
                found.append((int(match[1]), path))
        return sorted(found)

    def save_checkpoint(
        self, update: int, save_adapter: Callable[[Path], None], save_state: Callable[[Path], None], keep: int
    ) -> None:
        """Write a checkpoint, then remove all but the newest `keep`.

        Args:
            update: its number.
            save_adapter: writes the adapter into a folder.
            save_state: writes everything else into a file.
            keep: how many to keep.

        Raises:
            CheckpointError: it could not be written in full; the checkpoints before it are untouched.
        """

        def write(folder: Path) -> None:
            save_adapter(folder / "adapter")
            save_state(folder / "state.pt")

        self._replace(self.checkpoint(update), write)
        for _, old in self.checkpoints()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def save_best(self, save_adapter: Callable[[Path], None], *, end_of: int | None = None) -> None:
        """Replace the best adapter.

        Args:
            save_adapter: writes the adapter into a folder.
            end_of: the update after which the run ends, where only the validation at its end found this adapter. A run
                that goes on from there must not know of it, since one that was never stopped does not make that
                validation: the best adapter before is kept in the update's checkpoint, and `recover_best` takes it back.
        """
        if end_of is not None and self.best.is_dir():
            os.rename(self.best, self.checkpoint(end_of) / "best")
        self._replace(self.best, save_adapter)

    def recover_best(self, update: int) -> None:
        """Put the best adapter into the state in which the checkpoint being gone on from knew it.

        Args:
            update: whose adapter was the best; 0 where there was none.
        """
        old = self.best.with_name("best.old")
        if old.is_dir() and not self.best.exists():  # a kill between the two renames of a replacement
            os.rename(old, self.best)
        checkpoints = self.checkpoints()
        kept = checkpoints[-1][1] / "best" if checkpoints else None
        if kept is not None and kept.is_dir():
            _remove(self.best)
            os.rename(kept, self.best)
        if not update:
            _remove(self.best)

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint to go on from; None where there is none.

        Raises:
            CheckpointError: its weights are damaged.
        """
        checkpoints = self.checkpoints()
        if not checkpoints:
            return None
        path = checkpoints[-1][1]
        try:
            weights = list((path / "adapter").glob("*.safetensors"))
            for file in weights:
                with safe_open(file, "numpy"):  # reads the header and compares it with the file's length
                    pass
        except (SafetensorError, OSError) as error:
            raise damaged(path, error) from error
        if not weights:
            raise damaged(path, "it holds no weights (adapter/*.safetensors)")
        return path

    def discard(self) -> None:
        """Remove the folder."""
        _remove(self.path)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file."""

        def write(path: Path) -> None:
            path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

        self._replace(self.path / name, write)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        self._replace(self.path / name, lambda path: path.write_text(text, encoding="utf-8"))

    def read_json(self, name: str) -> Any:
        """Read a JSON file of the run; None where there is none."""
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def _replace(self, target: Path, write: Callable[[Path], Any]) -> None:
        """Let `write` fill a file or folder beside `target`, and put it in its place."""
        partial = target.with_name(target.name + ".partial")
        _remove(partial)
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            write(partial)
            _flush(partial)
            if target.is_dir():  # a folder cannot be renamed over another one
                old = target.with_name(target.name + ".old")
                _remove(old)
                os.rename(target, old)
                os.rename(partial, target)
                _remove(old)
            else:
                os.replace(partial, target)
        except Exception as error:  # safetensors and torch raise their own kinds when a disk is full
            _remove(partial)
            free = shutil.disk_usage(target.parent if target.parent.exists() else ".").free
            raise CheckpointError(
                f"{target} could not be written: {error}. {free / 1e6:,.0f} MB are free there; what was saved before is "
                "whole, and resume= goes on from it once there is room"
            ) from error


def damaged(checkpoint: Path, cause: object) -> CheckpointError:
    """The error for a checkpoint that cannot be read back."""
    return CheckpointError(
        f"{checkpoint} cannot be read back: {cause}. Remove that folder to go on from the checkpoint before it"
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Bring what was written to the disk before it gets its name."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
