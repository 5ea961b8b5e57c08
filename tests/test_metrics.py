"""The metrics log survives kills and full disks; progress and alarms say what a reader needs."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from grpo_agents.errors import CheckpointError
from grpo_agents.run.metrics import MetricsLog, alarms
from grpo_agents.run.progress import Progress, result_table


def test_lines_are_written_at_once_and_nonfinite_numbers_are_null(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append({"update": 1, "kl": float("nan"), "a": np.float32("inf"), "n": np.int64(3), "t": {"x": [0.5, None]}})
        assert path.read_text() == (
            '{"update": 1, "kl": null, "a": null, "n": 3, "t": {"x": [0.5, null]}, "nonfinite": ["a", "kl"]}\n'
        )
    assert MetricsLog.read(path)[0]["n"] == 3
    assert MetricsLog.read(tmp_path / "absent.jsonl") == []


def test_a_torn_last_line_is_left_out_and_cut_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"update": 1}\n{"update": 2}\n'
    for torn in (b"", b"{", b'{"update": 3', b'{"update": 3}'):
        path.write_bytes(whole + torn)
        assert [line["update"] for line in MetricsLog.read(path)] == [1, 2]
        with MetricsLog(path) as log:
            log.append({"update": 3})
        assert path.read_bytes() == whole + b'{"update": 3}\n'


def test_truncating_keeps_the_earlier_bytes_and_appending_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"update":0,  "x": 1.50}\n{"update": 1}\n{"update": 2}\n{"update": 3}\n')
    with MetricsLog(path) as log:
        log.truncate_after(1)
        log.append({"update": 2})
    assert path.read_bytes() == b'{"update":0,  "x": 1.50}\n{"update": 1}\n{"update": 2}\n'
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1}\nhello\n{"update": 2}\n')
    with pytest.raises(CheckpointError, match="hello"):
        MetricsLog.read(path)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append({"update": 1})
    real = os.write

    def half_then_full(descriptor: int, data: Any) -> int:
        if len(data) > 8:
            return real(descriptor, data[:8])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            log.append({"update": 2, "more": 1})
    log.append({"update": 3})
    log.close()
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_healthy_update_raises_no_alarm_and_each_bound_raises_its_own() -> None:
    healthy = {
        "groups/flat": 0.1,
        "actions/invalid": 0.0,
        "kl": 0.2,
        "ratio/max": 1.5,
        "ratio/ess": 0.9,
        "entropy": 0.5,
    }
    assert alarms(healthy) == alarms({}) == alarms({"kl": None}) == []
    for key, value, words in (
        ("groups/flat", 0.9, "90% of the groups are flat"),
        ("actions/invalid", 0.51, "51% of the replies are no action"),
        ("truncation", 0.97, "sampler.max_new_tokens"),
        ("kl", 11.0, "11 nats"),
        ("kl", float("nan"), "not finite"),
        ("ratio/max", 12.0, "probability ratio is 12"),
        ("ratio/ess", 0.05, "5.0% of the samples"),
        ("entropy", 0.001, "loss.entropy"),
    ):
        (text,) = alarms({**healthy, key: value})
        assert words in text


class Clock:
    """Seconds set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def line(update: int, env_steps: int, **extra: Any) -> dict[str, Any]:
    return {"update": update, "env_steps": env_steps, "return/mean": 20.0 + update, "kl": 0.01, "entropy": 0.6, **extra}


def test_time_left_is_that_of_the_nearer_limit_at_the_pace_of_this_process() -> None:
    clock = Clock()
    console = Console(file=io.StringIO())
    with Progress(20, 100_000, start_update=10, start_env_steps=40_000, console=console, clock=clock) as progress:
        assert progress.seconds_left() is None
        clock.now += 30
        progress.update(line(12, 44_000))
        # 2 of 10 updates in 30 s leave 120 s; 4,000 of 60,000 steps in 30 s would leave 420 s.
        assert progress.seconds_left() == pytest.approx(120)


def test_without_a_terminal_each_update_is_one_plain_aligned_line() -> None:
    out = io.StringIO()
    with Progress(None, None, console=Console(file=out)) as progress:
        progress.update(line(9, 900, **{"groups/flat": 1.0}))
        progress.update(line(10, 12_000, **{"groups/flat": 1.0, "validation/mean": 55.0}))
    first, warning, second = out.getvalue().splitlines()
    assert first == "update     9  env steps        900  return     29.0  kl  0.0100  entropy  0.600  left   --:--"
    assert warning.startswith("warning: 100% of the groups are flat")
    assert second.startswith("update    10  env steps     12,000  return     30.0")
    assert second.endswith("validation     55.0")
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_bar_shows_both_counts_and_the_last_validation() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with Progress(4, 1000, console=console) as progress:
        progress.update(line(1, 500, **{"validation/mean": 44.0}))
        progress.update(line(2, 750))
        progress.phase("play 3/8")
        progress.note("a note")
    shown = out.getvalue()
    for words in ("75%", "update 2/4", "env steps 750/1,000", "validation 44.0", "play 3/8", "a note"):
        assert words in shown


def test_the_result_table_has_mean_interval_episodes_and_cost() -> None:
    row = {"mean": 484.44, "ci_low": 474.9, "ci_high": 492.6, "episodes": 100}
    out = io.StringIO()
    table = result_table({"random": row, "trained": row}, env_steps=87_123, wall_s=3_783.0)
    Console(file=out, width=100).print(table)
    for words in ("random", "trained", "484.4", "[474.9, 492.6]", "100", "87,123 environment steps, 1:03:03 wall time"):
        assert words in out.getvalue()
