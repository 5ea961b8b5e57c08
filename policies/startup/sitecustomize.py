"""Lets torchvision be imported beside a CPU build of torch in processes that other packages start.

vLLM starts processes of its own (to inspect a model's class, to run its engine) and imports torchvision in them before it
loads any plugin. Python runs this file at the start of every process that has its folder on PYTHONPATH; nothing is
imported until torchvision is. See `grpo_agents.policies.torchvision_ops`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing, and is asked first: it declares the missing operators just before torchvision is looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from grpo_agents.policies.torchvision_ops import register_missing_ops

            register_missing_ops()
        return None


sys.meta_path.insert(0, BeforeTorchvision())
