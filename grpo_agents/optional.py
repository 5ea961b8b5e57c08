"""One way to import a package that not everybody needs."""

from __future__ import annotations

import importlib
from types import ModuleType

from grpo_agents.errors import MissingDependencyError


def require(module: str, extra: str | None, purpose: str) -> ModuleType:
    """Import `module`, or say what installs it.

    Args:
        module: dotted name, as in an import statement.
        extra: the extra of this project that installs it; None for what every installation has.
        purpose: what it is needed for, to end the sentence "... is needed for".

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f'".[{extra}]"' if extra else "."
        raise MissingDependencyError(
            f"{module} is needed for {purpose} and cannot be imported ({error}). "
            f"Install it with: pip install -c constraints.txt -e {what}"
        ) from error
