"""Plays episodes in a terminal: two pixels a character, the action probabilities below."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from grpo_agents.run.moment import Moment, Pace, Viewer
from grpo_agents.run.panel import BAR, CHOSEN

MOST_COLUMNS = 160
"""Wider pictures cost more time than they show detail."""
MOST_ROWS_OF_ACTIONS = 6
PLAIN_EVERY = 10
"""Steps between two lines where no picture can be shown."""


class TerminalViewer(Viewer):
    """Half-block characters in 24-bit colour, scaled to the terminal's size with the aspect ratio kept.

    Where stdout is no terminal, or one without colours (NO_COLOR, TERM=dumb), one plain line is printed for every tenth
    step instead, without waiting. Stop with Ctrl-C; the last picture stays.

    Args:
        fps: moments a second.
        console: where to play; default: stdout.
        clock: seconds from any origin; for tests.
        sleep: waits for so many seconds; for tests.
    """

    def __init__(
        self,
        fps: float,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.console = console or Console()
        self.plain = not self.console.is_terminal or self.console.no_color or self.console.color_system is None
        self._pace = Pace(fps, clock, sleep)
        self._live = Live(console=self.console, auto_refresh=False)

    def show(self, moment: Moment) -> bool:
        if self.plain:
            if moment.step % PLAIN_EVERY == 0:
                self.console.print(Text(_plain_line(moment)), soft_wrap=True)
            return True
        self._pace.wait()
        self._live.start()
        self._live.update(render(moment, self.console.width, self.console.height), refresh=True)
        return True

    def close(self) -> None:
        self._live.stop()


def render(moment: Moment, width: int, height: int) -> RenderableType:
    """The moment as it stands in a terminal of so many columns and lines, one line left free.

    Of more than `SHOWN_ACTIONS` actions, or more than half of the lines hold, the likeliest are listed.
    """
    actions = _action_lines(moment, width, height)
    counters = f"step {moment.step:<6} episode {moment.episode:<4} return {moment.total_text():<8}"
    head = Text.assemble((moment.title, "bold"), "  ", counters, no_wrap=True, overflow="ellipsis")
    picture = half_blocks(moment.picture, min(width, MOST_COLUMNS), height - len(actions) - 2)
    return Group(picture, head, *actions)


def half_blocks(picture: NDArray[np.uint8], columns: int, rows: int) -> Segments:
    """The picture as lines of upper half blocks: the foreground is the upper pixel, the background the lower one.

    Args:
        picture: uint8 (H, W, 3).
        columns: most characters in a line.
        rows: most lines; below 4, 4 are taken.
    """
    height, width = picture.shape[:2]
    factor = min(columns / width, 2 * max(rows, 4) / height)
    # An even number of pixel rows fills every character.
    size = (max(round(width * factor), 1), 2 * max(round(height * factor / 2), 1))
    pixels = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BOX))
    return Segments(_segments(pixels))


def _segments(pixels: NDArray[np.uint8]) -> Iterator[Segment]:
    """Runs of equal characters, line by line. pixels: uint8 (2 x lines, columns, 3)."""
    # 5 bits a channel: the eye hardly sees the difference, and styles are found again in the cache.
    codes = (pixels >> 3).astype(np.int64) @ np.array([1024, 32, 1])
    for upper, lower in zip(codes[::2], codes[1::2], strict=True):
        pairs = upper << 15 | lower
        starts = np.concatenate([[0], np.flatnonzero(np.diff(pairs)) + 1, [len(pairs)]])
        for start, end in itertools.pairwise(starts.tolist()):
            yield Segment("▀" * (end - start), _style(int(upper[start]), int(lower[start])))
        yield Segment.line()


@functools.lru_cache(maxsize=65536)
def _style(upper: int, lower: int) -> Style:
    """The style of one character; arguments are 15-bit colours."""
    foreground, background = (
        # 5 bits are stretched to 8 so that the brightest stays white.
        Color.from_rgb(*(value << 3 | value >> 2 for value in (code >> 10, code >> 5 & 31, code & 31)))
        for code in (upper, lower)
    )
    return Style(color=foreground, bgcolor=background)


def _action_lines(moment: Moment, width: int, height: int) -> list[Text]:
    """Word, bar and number of each action, read down one column, then the next."""
    indices = moment.listed()
    if not indices:
        return []
    word = min(max(map(len, moment.actions)), 16)
    # Marker, word, bar, number and the spaces between; below 6 characters a bar says nothing.
    fixed = 2 + word + 1 + 1 + 4
    columns = max(min(math.ceil(len(indices) / MOST_ROWS_OF_ACTIONS), (width + 3) // (fixed + 6 + 3)), 1)
    # Half of the terminal is left to the picture.
    indices = moment.listed(min(len(indices), columns * max(height // 2, 1)))
    rows = math.ceil(len(indices) / columns)
    bar = max(min((width + 3) // columns - 3 - fixed, 30), 1)
    lines = [Text(no_wrap=True, overflow="crop") for _ in range(rows)]
    for place, index in enumerate(indices):
        line = lines[place % rows]
        if place >= rows:
            line.append("   ")
        chosen = index == moment.choice
        probability = float(moment.probabilities[index])
        filled = min(max(round(probability * bar), 0), bar)
        style = f"bold {CHOSEN}" if chosen else ""
        line.append("> " if chosen else "  ", style)
        line.append(f"{moment.actions[index][:word]:<{word}} ", style)
        line.append("█" * filled, CHOSEN if chosen else BAR)
        line.append("░" * (bar - filled), "bright_black")
        line.append(f" {probability:.2f}", style)
    return lines


def _plain_line(moment: Moment) -> str:
    chosen = moment.actions[moment.choice] if 0 <= moment.choice < len(moment.actions) else "-"
    listed = ", ".join(f"{moment.actions[index]} {float(moment.probabilities[index]):.2f}" for index in moment.listed())
    return f"episode {moment.episode}  step {moment.step}  return {moment.total_text()}  {chosen}  ({listed})"
