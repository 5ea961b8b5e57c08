"""Shows episodes in a window."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from grpo_agents.errors import EnvironmentSetupError
from grpo_agents.optional import require
from grpo_agents.run.moment import Moment, Pace, Viewer
from grpo_agents.run.panel import draw_frame

BLIND_DRIVERS = ("dummy", "offscreen")
"""SDL's video drivers that show nothing."""


class WindowViewer(Viewer):
    """A pygame window with the environment's frame and the panel. Closing it, Escape or Q ends the show.

    Args:
        fps: moments a second.
        allow_dummy: accept SDL's dummy driver, which shows nothing; for tests.
        clock: seconds from any origin; for tests.
        sleep: waits for so many seconds; for tests.

    Raises:
        EnvironmentSetupError: this machine has no display.
        MissingDependencyError: pygame is not installed.
    """

    def __init__(
        self,
        fps: float,
        *,
        allow_dummy: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        check_display(allow_dummy)
        self._pygame = require("pygame", None, "render=human")
        self._allow_dummy = allow_dummy
        self._pace = Pace(fps, clock, sleep)
        self._screen: Any = None
        self._stopped = False
        self._start_display()

    def show(self, moment: Moment) -> bool:
        """Draw the moment when it is due; False once the user has closed the window."""
        if self._stopped:
            return False
        pygame = self._pygame
        # Gymnasium's own environments shut pygame's display down when they are closed.
        if not pygame.display.get_init():
            self._start_display()
        frame = draw_frame(moment)
        size = frame.shape[1::-1]
        if self._screen is None or self._screen.get_size() != size:
            self._screen = self._opened(size)
        pygame.display.set_caption(moment.title)
        self._pace.wait()
        pygame.surfarray.blit_array(self._screen, frame.swapaxes(0, 1))
        pygame.display.flip()
        if any(self._means_stop(event) for event in pygame.event.get()):
            self._stopped = True
            self.close()
        return not self._stopped

    def close(self) -> None:
        self._screen = None
        # Not pygame.quit: environments that still render use the rest of pygame.
        self._pygame.display.quit()

    def _start_display(self) -> None:
        self._screen = None
        try:
            self._pygame.display.init()
        except self._pygame.error as error:
            raise _no_display(f"SDL says: {error}") from error
        # A display that is named but does not answer makes SDL fall back.
        driver = self._pygame.display.get_driver()
        if driver in BLIND_DRIVERS and not self._allow_dummy:
            self._pygame.display.quit()
            raise _no_display(f"SDL could open none and fell back to its {driver} driver")

    def _opened(self, size: tuple[int, int]) -> Any:
        try:
            return self._pygame.display.set_mode(size)
        except self._pygame.error as error:
            raise _no_display(f"SDL says: {error}") from error

    def _means_stop(self, event: Any) -> bool:
        pygame = self._pygame
        return event.type == pygame.QUIT or (
            event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)
        )


def check_display(allow_dummy: bool = False) -> None:
    """Refuse before SDL is asked: it would print warnings of its own, or fall back to a driver that shows nothing.

    Raises:
        EnvironmentSetupError: this machine has no display.
    """
    driver = os.environ.get("SDL_VIDEODRIVER", "")
    if driver in BLIND_DRIVERS:
        if not allow_dummy:
            raise _no_display(f"SDL_VIDEODRIVER is {driver}, which shows nothing")
        return
    # A driver that was asked for by name, such as kmsdrm, may need neither variable.
    named = driver or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not named:
        raise _no_display("neither DISPLAY nor WAYLAND_DISPLAY is set")


def _no_display(cause: str) -> EnvironmentSetupError:
    return EnvironmentSetupError(
        f"render=human: there is no display ({cause}). Use render=video, which writes an MP4 file, or render=terminal"
    )
