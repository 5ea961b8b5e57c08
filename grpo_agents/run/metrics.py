"""A run's numbers: one JSON object an update on disk, whole whatever kills the process, and what they warn of."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_agents.errors import CheckpointError

FLAT_SHARE = 0.9
"""Share of flat groups (all members scored alike) from which an update has next to nothing to learn from."""
INVALID_SHARE = 0.5
"""Share of replies that are no action above which the environment's fallback plays, not the policy."""
KL_LIMIT = 10.0
"""KL to the start in nats a token; a choice among three words is at most ln 3 = 1.1 away from even odds."""
RATIO_LIMIT = 10.0
"""Largest ratio of new to old probability; beyond it sampler and learner disagree, or the step is far too long."""
ESS_SHARE = 0.1
"""Effective sample size over the number of samples below which few samples carry the whole update."""
ENTROPY_FLOOR = 0.01
"""Entropy in nats a token below which the members of a group all play alike."""
TRUNCATED_SHARE = 0.5
"""Share of replies cut at max_new_tokens above which most of what the policy says is lost."""


class MetricsLog:
    """`metrics.jsonl`: appended line by line, each on the disk before `append` returns.

    A number that is not finite is written as null, with its key listed under "nonfinite" (JSON has no NaN). A last line
    without its newline is what a kill left of a write; it is cut off when the log is opened.

    Args:
        path: the file; made, with its folder, when absent.

    Raises:
        CheckpointError: the file cannot be opened or written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._cut_torn_line()
            self._descriptor = self._open()
        except OSError as error:
            raise self._failure(error) from error

    def append(self, metrics: dict[str, Any]) -> None:
        """Write one line.

        Args:
            metrics: JSON values, NumPy scalars or one-element tensors, in lists and dictionaries too.

        Raises:
            CheckpointError: the disk is full or the file cannot be written; the lines before it stay whole.
        """
        nonfinite: list[str] = []
        record = {key: _jsonable(value, key, nonfinite) for key, value in metrics.items()}
        if nonfinite:
            record["nonfinite"] = sorted(nonfinite)
        data = memoryview((json.dumps(record, allow_nan=False) + "\n").encode())
        end = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise self._failure(error) from error

    def truncate_after(self, update: int) -> None:
        """Drop the lines of later updates, as a resume from the checkpoint of `update` must.

        The file is replaced in one step; the lines kept are byte for byte as they were.

        Raises:
            CheckpointError: the file cannot be written.
        """
        kept = [line for line in _whole_lines(self.path) if _parse(self.path, line).get("update", -1) <= update]
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(b"".join(kept))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
            os.close(self._descriptor)
            self._descriptor = self._open()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @staticmethod
    def read(path: str | Path) -> list[dict[str, Any]]:
        """All whole lines of a log, oldest first; empty when there is no file. A torn last line is left out.

        Raises:
            CheckpointError: the file cannot be read, or a line before the last is no JSON object.
        """
        return [_parse(Path(path), line) for line in _whole_lines(Path(path))]

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _cut_torn_line(self) -> None:
        if self.path.exists():
            whole = sum(map(len, _whole_lines(self.path)))
            if whole < self.path.stat().st_size:
                os.truncate(self.path, whole)

    def _failure(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be written ({error.strerror or error}). Free some space or check its permissions, "
            f"then go on with resume={self.path.parent}"
        )


def alarms(metrics: Mapping[str, Any]) -> list[str]:
    """Warnings about an update, one sentence each with the value and what to change; empty when all is well.

    Args:
        metrics: any of groups/flat, actions/invalid, truncation (shares from 0 to 1), kl and entropy (nats a token),
            ratio/max, ratio/ess (share of the samples). Keys that are absent or None are passed over.
    """
    return list(alarms_by_key(metrics).values())


def alarms_by_key(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The warnings by the key that raised each."""
    checks: list[tuple[str, Callable[[float], bool], str]] = [
        (
            "groups/flat",
            lambda value: value >= FLAT_SHARE,
            "{:.0%} of the groups are flat (all members scored alike): the task is too easy or too hard from these "
            "starts; try group.start=restart, a higher sampler.temperature or another reward",
        ),
        (
            "actions/invalid",
            lambda value: value > INVALID_SHARE,
            "{:.0%} of the replies are no action: name the action words in env.rules, or start from a model that was "
            "fine-tuned to answer with them",
        ),
        (
            "truncation",
            lambda value: value > TRUNCATED_SHARE,
            "{:.0%} of the replies were cut at the length limit: raise sampler.max_new_tokens",
        ),
        (
            "kl",
            lambda value: value > KL_LIMIT,
            "the policy is {:.3g} nats a token away from its start: lower learner.lr or raise loss.beta",
        ),
        (
            "ratio/max",
            lambda value: value > RATIO_LIMIT,
            "the largest probability ratio is {:.3g}: sampler and learner disagree or the step is too long; lower "
            "learner.lr or learner.epochs",
        ),
        (
            "ratio/ess",
            lambda value: value < ESS_SHARE,
            "the effective sample size is {:.1%} of the samples: lower learner.lr or learner.epochs",
        ),
        (
            "entropy",
            lambda value: value < ENTROPY_FLOOR,
            "entropy is {:.2g} nats a token, so group members play alike: raise loss.entropy or lower learner.lr",
        ),
    ]
    raised = {}
    for key, is_raised, sentence in checks:
        value = metrics.get(key)
        if value is None:
            continue
        if not math.isfinite(value):
            raised[key] = f"{key} is {value}: the update is not finite; lower learner.lr"
        elif is_raised(value):
            raised[key] = sentence.format(float(value))
    return raised


def _whole_lines(path: Path) -> list[bytes]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}). Check its permissions") from error
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _parse(path: Path, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{path} holds a line that is no JSON object: {line[:80]!r}. It was not written by a run; remove that line"
        )
    return record


def _jsonable(value: Any, key: str, nonfinite: list[str]) -> Any:
    """A value for `json.dumps`; None, and the key added to `nonfinite`, where a number is not finite."""
    if isinstance(value, dict):
        return {str(inner): _jsonable(item, f"{key}/{inner}", nonfinite) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item, key, nonfinite) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = value if isinstance(value, float) else value.item()
    if isinstance(number, float) and not math.isfinite(number):
        if key not in nonfinite:
            nonfinite.append(key)
        return None
    return number
