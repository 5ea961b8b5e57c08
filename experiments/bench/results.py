"""The file that a benchmark's measurements are kept in: JSON, one line a part, so that parts can be done one by one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from grpo_agents.errors import ConfigError

Record = dict[str, Any]


class Results:
    """Records by the name of the part.

    Args:
        path: the file; it need not exist yet.

    Raises:
        ConfigError: the file is there and is not one of results.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        try:
            self.parts: dict[str, Record] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.parts = {}
        except ValueError as error:
            raise ConfigError([f"output={path} is no results file ({error}). Name another, or remove it"]) from error

    def put(self, name: str, record: Record) -> None:
        """Add a part, or replace it, and write the file in one step."""
        with self._lock:
            self.parts[name] = record
            lines = [f"{json.dumps(key)}: {json.dumps(self.parts[key])}" for key in sorted(self.parts)]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            os.replace(temporary, self.path)
