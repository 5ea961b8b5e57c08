"""What every command does around its work: messages instead of tracebacks, and dependable exit statuses."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from grpo_agents.errors import GrpoAgentsError

INTERRUPTED = 130
"""Exit status after Ctrl-C (SIGINT): 128 and the signal's number, as shells have it."""
TERMINATED = 143
"""Exit status after SIGTERM, which batch systems send before they kill."""


def run_command(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> int:
    """Run a command and say how it ended.

    SIGTERM is handled as Ctrl-C is: the work stops with `KeyboardInterrupt`, so that files are closed and the command
    can say how to go on.

    Args:
        main: the command; takes the words of the command line, returns its exit status (None is 0).
        argv: those words; default: the process's own.

    Returns:
        What to give to `sys.exit`: 0 when it ended as asked; the error's own `exit_status`, with its message and no
        traceback on stderr, for a `GrpoAgentsError` (2 for a wrong setting); 130 after Ctrl-C; 143 after SIGTERM; 1,
        with the traceback, for anything else.
    """
    with _terminated_as_interrupted() as terminations:
        try:
            return main(sys.argv[1:] if argv is None else argv) or 0
        except GrpoAgentsError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_status
        except KeyboardInterrupt:
            return TERMINATED if terminations else INTERRUPTED
        except SystemExit as stop:
            if stop.code is None or isinstance(stop.code, int):
                return stop.code or 0
            print(stop.code, file=sys.stderr)
            return 1
        except Exception:
            traceback.print_exc()
            return 1


def draw_without_display() -> None:
    """Let environments render where there is no display: SDL would look for one, and complain on stderr.

    Has to be called before pygame starts. A driver that was chosen by hand is left alone.
    """
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not display:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


@contextmanager
def _terminated_as_interrupted() -> Iterator[list[int]]:
    """Within this context SIGTERM does what Ctrl-C does; yields the list of the SIGTERMs that came."""
    terminations: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        terminations.append(number)
        # asyncio puts a handler of its own in place while it runs, which cancels what is awaited. A process that a shell
        # started in the background ignores SIGINT and has none.
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(number, frame)

    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield terminations
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield terminations
    finally:
        signal.signal(signal.SIGTERM, before)
