"""The ways of watching an episode: a window, a video file, a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from grpo_agents.run.moment import Moment, Viewer
from grpo_agents.run.panel import draw_panel
from grpo_agents.run.terminal import TerminalViewer
from grpo_agents.run.video import VideoViewer
from grpo_agents.run.window import WindowViewer

__all__ = ["Moment", "TerminalViewer", "VideoViewer", "Viewer", "WindowViewer", "draw_panel", "open_viewer"]


def open_viewer(kind: Literal["human", "video", "terminal"], *, path: str | Path, fps: float) -> Viewer:
    """The viewer for a `render` setting.

    Args:
        kind: human (a window), video (an MP4 file) or terminal.
        path: the MP4 file, with its name; only a video is written.
        fps: moments a second.

    Raises:
        EnvironmentSetupError: human, on a machine without a display.
    """
    if kind == "human":
        return WindowViewer(fps)
    if kind == "terminal":
        return TerminalViewer(fps)
    return VideoViewer(path, fps)
