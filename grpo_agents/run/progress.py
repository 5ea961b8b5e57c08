"""What a run shows while it goes on and when it ends: a progress bar or plain lines, warnings, the result table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_agents.run.metrics import alarms_by_key


class Progress:
    """Shows an on-policy run: a live bar on a terminal, else one aligned line for each update. A context manager.

    A warning (`alarms`) is printed when it is raised, and again only after it has been silent for an update.

    Args:
        updates: limit of updates, or None.
        env_steps: limit of environment steps, or None.
        start_update: updates done before this process, for a resumed run.
        start_env_steps: environment steps done before this process.
        console: where to write; default: stdout.
        clock: seconds from any origin; for tests.
    """

    def __init__(
        self,
        updates: int | None,
        env_steps: int | None,
        *,
        start_update: int = 0,
        start_env_steps: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console = console or Console()
        self.limits = {"update": updates, "env_steps": env_steps}
        self._start = {"update": start_update, "env_steps": start_env_steps}
        self._clock = clock
        self._began = clock()
        self._metrics: dict[str, Any] = dict(self._start)
        self._phase = ""
        self._active: set[str] = set()
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        self._began = self._clock()
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show an update.

        Args:
            metrics: update and env_steps (both in all), and where known return/mean, kl, entropy,
                time/steps_per_second, validation/mean, and the keys of `alarms`.
        """
        validation = metrics.get("validation/mean", self._metrics.get("validation/mean"))
        self._metrics = {**metrics, "validation/mean": validation}
        if not self.console.is_terminal:
            self._print(self._line(metrics))
        raised = alarms_by_key(metrics)
        for key, sentence in raised.items():
            if key not in self._active:
                self.note(f"warning: {sentence}", style="yellow")
        self._active = set(raised)

    def phase(self, text: str) -> None:
        """Say what is going on inside an update, such as "play 120/512"; shown beside the bar on a terminal only."""
        self._phase = text

    def note(self, text: str, style: str = "") -> None:
        """Print a line that stays, above the bar."""
        self._print(text, style)

    def seconds_left(self) -> float | None:
        """Seconds until the nearer of the two limits at the pace so far; None before the first update."""
        elapsed = self._clock() - self._began
        left = []
        for key, limit in self.limits.items():
            done = self._metrics[key] - self._start[key]
            if limit is not None and done > 0:
                left.append(max(0, limit - self._metrics[key]) * elapsed / done)
        return min(left, default=None)

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style or None, highlight=False, markup=False, soft_wrap=True)

    def _numbers(self, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
        formats = {
            "return/mean": ("return", "8.1f"),
            "validation/mean": ("validation", "8.1f"),
            "kl": ("kl", "7.4f"),
            "entropy": ("entropy", "6.3f"),
            "time/steps_per_second": ("steps/s", "6,.0f"),
        }
        return [
            (label, format(metrics[key], spec))
            for key, (label, spec) in formats.items()
            if isinstance(metrics.get(key), int | float)
        ]

    def _line(self, metrics: Mapping[str, Any]) -> str:
        numbers = dict(self._numbers(metrics))
        # Validation comes every few updates: last on the line, so that the other columns stay aligned.
        validation = numbers.pop("validation", None)
        parts = [f"update {metrics['update']:5d}", f"env steps {metrics['env_steps']:10,d}"]
        parts += [f"{label} {value}" for label, value in numbers.items()]
        parts.append(f"left {_clock_text(self.seconds_left()):>7}")
        return "  ".join([*parts, *([f"validation {validation}"] if validation else [])])

    def _render(self) -> Group:
        shares = [self._metrics[key] / limit for key, limit in self.limits.items() if limit]
        share = min(1.0, max(shares, default=0.0))
        elapsed = self._clock() - self._began
        bar = Table.grid(padding=(0, 1))
        times = f"{_clock_text(elapsed)} gone, {_clock_text(self.seconds_left())} left"
        bar.add_row(ProgressBar(total=1.0, completed=share, width=36), f"{share:4.0%}", times)
        counts = f"update {self._count('update')}  env steps {self._count('env_steps')}  {self._phase}"
        numbers = "  ".join(f"{label} {value.strip()}" for label, value in self._numbers(self._metrics))
        return Group(bar, Text(counts, no_wrap=True), Text(numbers, style="dim", no_wrap=True))

    def _count(self, key: str) -> str:
        limit = self.limits[key]
        return f"{self._metrics[key]:,}" + ("" if limit is None else f"/{limit:,}")


def result_table(
    rows: Mapping[str, Mapping[str, Any]], *, env_steps: int | None = None, wall_s: float | None = None
) -> Table:
    """The table that ends a run.

    Args:
        rows: summaries as `grpo_agents.run.statistics.summarize` gives them, by policy: random, untrained, trained.
        env_steps: environment steps played in training, for the caption.
        wall_s: wall time of training in seconds, for the caption.
    """
    caption = ", ".join(
        [
            *([] if env_steps is None else [f"{env_steps:,} environment steps"]),
            *([] if wall_s is None else [f"{_clock_text(wall_s)} wall time"]),
        ]
    )
    table = Table(title="Return on held-out seeds", caption=caption or None)
    table.add_column("policy")
    for column in ("mean", "95% interval", "episodes"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        interval = f"[{row['ci_low']:.1f}, {row['ci_high']:.1f}]"
        table.add_row(name, f"{row['mean']:.1f}", Text(interval), str(row["episodes"]))
    return table


def _clock_text(seconds: float | None) -> str:
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
