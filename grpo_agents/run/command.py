"""What every command does around its work: messages instead of tracebacks, and dependable exit statuses."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from grpo_agents.errors import GrpoAgentsError

INTERRUPTED = 130


def run_command(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> int:
    """Run a command and say how it ended.

    Args:
        main: the command; takes the words of the command line, returns its exit status (None is 0).
        argv: those words; default: the process's own.

    Returns:
        What to give to `sys.exit`: 0 when it ended as asked; the error's own `exit_status`, with its message and no
        traceback on stderr, for a `GrpoAgentsError` (2 for a wrong setting); 130 after Ctrl-C; 1, with the traceback,
        for anything else.
    """
    try:
        return main(sys.argv[1:] if argv is None else argv) or 0
    except GrpoAgentsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
