"""Videos hold what was shown and are whole or absent; a terminal and a window fall back in words."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import av
import numpy as np
import pygame
import pytest
from numpy.typing import NDArray
from rich.console import Console
from rich.segment import Segment

from grpo_agents.errors import CheckpointError, EnvironmentSetupError
from grpo_agents.run.panel import BAR, CHOSEN, draw_frame
from grpo_agents.run.terminal import half_blocks, render
from grpo_agents.run.viewers import Moment, TerminalViewer, VideoViewer, WindowViewer, draw_panel, open_viewer

WAYS = ("UP", "RIGHT", "LEFT", "DOWN", "UPRIGHT", "UPLEFT", "DOWNRIGHT", "DOWNLEFT")
ATARI = ("NOOP", "FIRE", *WAYS, *(f"{way}FIRE" for way in WAYS))
"""The 18 actions of the Arcade Learning Environment."""


def moment(step: int = 1, actions: tuple[str, ...] = ("left", "right"), choice: int = 1, height: int = 400) -> Moment:
    """A picture whose brightness grows with the step."""
    return Moment(
        picture=np.full((height, 601, 3), min(20 * step, 255), np.uint8),
        seen=np.full((32, 96, 3), 255, np.uint8),
        actions=actions,
        probabilities=np.full(len(actions), 1 / max(len(actions), 1)),
        choice=choice,
        step=step,
        episode=1,
        total=float(step),
        title="CartPole-v1",
    )


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


def test_a_video_holds_each_moment_once(tmp_path: Path) -> None:
    path = tmp_path / "episode.mp4"
    with open_viewer("video", path=path, fps=15) as viewer:
        for step in range(9):
            # The last is of another size and is fitted in.
            assert viewer.show(moment(step, height=400 if step < 8 else 500))
        assert not path.exists()
    with av.open(path) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert stream.average_rate == 15
        assert stream.pix_fmt == "yuv420p"
    assert [frame.shape for frame in frames] == [(400, 922, 3)] * 9
    # 2 is what the conversion to yuv420p and back may change.
    np.testing.assert_allclose([frame[200, 200].mean() for frame in frames[:8]], np.arange(8) * 20, atol=2)
    assert os.listdir(tmp_path) == ["episode.mp4"]


def test_a_video_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "episode.mp4"
    with VideoViewer(path, 30):
        pass
    with suppress(KeyboardInterrupt), VideoViewer(path, 30) as viewer:
        viewer.show(moment())
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with (
        pytest.raises(CheckpointError, match=r"missing.*episode\.mp4 cannot be written"),
        VideoViewer(tmp_path / "missing" / "episode.mp4", 30) as viewer,
    ):
        viewer.show(moment())


def rows_of(panel: NDArray[np.uint8], color: str) -> NDArray[np.int64]:
    """Heights at which the colour is found."""
    wanted = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    return np.flatnonzero((panel == wanted).all(axis=-1).any(axis=1))


@pytest.mark.parametrize("height", [400, 420, 800])
@pytest.mark.parametrize("count", [2, 9, 18, 20, 25])
def test_a_panel_shows_every_action_within_its_height(count: int, height: int) -> None:
    actions = (ATARI * 2)[:count]
    panel = draw_panel(moment(actions=actions, choice=0), height)
    assert panel.shape == (height, 320 if height == 400 else 336 if height == 420 else 480, 3)
    rows = np.concatenate([rows_of(panel, CHOSEN), rows_of(panel, BAR)])
    assert rows.max() < height - 8
    # Bars stand in rows, separated by the ground: one of two columns has rows enough.
    starts = 1 + np.count_nonzero(np.diff(np.unique(rows)) > 1)
    assert starts == {2: 2, 9: 9, 18: 9, 20: 10, 25: 10}[count]


def test_of_too_many_actions_the_chosen_and_the_likeliest_are_listed() -> None:
    many = moment(actions=tuple(map(str, range(30))), choice=3)
    many.probabilities[10:] = np.linspace(0.1, 0.2, 20)
    assert many.listed() == [3, *range(11, 30)]


def test_a_free_reply_and_small_pictures_are_drawn_too() -> None:
    frame = draw_frame(moment(actions=(), choice=-1, height=210))
    assert frame.shape == (420, 1202 + 336, 3)


def test_half_blocks_are_the_picture() -> None:
    picture = np.zeros((4, 6, 3), np.uint8)
    picture[0, :2] = 255
    picture[1, :2] = (255, 0, 0)
    lines: list[list[tuple[str, str, str]]] = [[]]
    for segment in half_blocks(picture, columns=6, rows=10).segments:
        if segment.text == "\n":
            lines.append([])
        else:
            assert segment.style and segment.style.color and segment.style.bgcolor
            lines[-1].append((segment.text, segment.style.color.name, segment.style.bgcolor.name))
    assert lines == [
        [("▀▀", "#ffffff", "#ff0000"), ("▀▀▀▀", "#000000", "#000000")],
        [("▀" * 6, "#000000", "#000000")],
        [],
    ]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 20), (200, 50)])
@pytest.mark.parametrize("actions", [("left", "right"), ATARI])
def test_a_terminal_plays_in_colour_within_its_size(width: int, height: int, actions: tuple[str, ...]) -> None:
    file, time = io.StringIO(), Time()
    console = Console(
        file=file, force_terminal=True, color_system="truecolor", width=width, height=height, _environ={"TERM": "xterm"}
    )
    with TerminalViewer(20, console, clock=time.clock, sleep=time.sleep) as viewer:
        for step in range(1, 4):
            viewer.show(moment(step, actions))
    # The first is due at once.
    assert time.slept == [0.05, 0.05]
    written = file.getvalue()
    assert {f"{1 / len(actions):.2f}", "▀", "38;2;"} <= set(re.findall(r"0\.\d\d|▀|38;2;", written))
    lines = console.render_lines(render(moment(3, actions), width, height), pad=False)
    assert len(lines) < height
    assert max(Segment.get_line_length(line) for line in lines) <= width


def test_without_a_terminal_every_tenth_step_is_a_plain_line() -> None:
    file, time = io.StringIO(), Time()
    viewer = TerminalViewer(20, Console(file=file, force_terminal=False), clock=time.clock, sleep=time.sleep)
    with viewer:
        for step in range(1, 25):
            assert viewer.show(moment(step))
    assert file.getvalue().splitlines() == [
        "episode 1  step 10  return 10  right  (left 0.50, right 0.50)",
        "episode 1  step 20  return 20  right  (left 0.50, right 0.50)",
    ]
    assert time.slept == []


def test_a_window_shows_the_frame_at_its_pace_and_reopens() -> None:
    time = Time()
    with WindowViewer(50, allow_dummy=True, clock=time.clock, sleep=time.sleep) as viewer:
        assert viewer.show(moment(1))
        screen = pygame.display.get_surface()
        assert screen is not None
        shown = pygame.surfarray.array3d(screen).swapaxes(0, 1)
        np.testing.assert_array_equal(shown, draw_frame(moment(1)))
        # As an environment of Gymnasium does when it is closed.
        pygame.quit()
        time.now += 0.005
        assert viewer.show(moment(2))
        assert time.slept == [0.015]
    assert not pygame.display.get_init()


@pytest.mark.parametrize(
    "event",
    [
        pygame.event.Event(pygame.QUIT),
        pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE),
        pygame.event.Event(pygame.KEYDOWN, key=pygame.K_q),
    ],
    ids=["closed", "escape", "q"],
)
def test_a_window_that_the_user_closes_stays_closed(event: pygame.event.Event) -> None:
    with WindowViewer(1000, allow_dummy=True) as viewer:
        assert viewer.show(moment())
        pygame.event.post(event)
        assert not viewer.show(moment())
        assert not viewer.show(moment())
        assert not pygame.display.get_init()


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        ({}, "neither DISPLAY nor WAYLAND_DISPLAY is set"),
        ({"SDL_VIDEODRIVER": "dummy"}, "SDL_VIDEODRIVER is dummy"),
        ({"SDL_VIDEODRIVER": "no_such_driver"}, "SDL says"),
    ],
)
def test_without_a_display_the_error_names_the_alternatives(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cause: str
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentSetupError, match=rf"{cause}.*render=video.*render=terminal"):
        open_viewer("human", path="unused.mp4", fps=30)


def test_pygame_is_imported_by_the_window_alone() -> None:
    code = "import sys, grpo_agents.run.viewers; print('pygame' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
