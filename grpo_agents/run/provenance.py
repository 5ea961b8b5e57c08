"""What a result depends on besides its settings: versions and hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    names = ("grpo_agents", "torch", "transformers", "peft", "accelerate", "gymnasium", "numpy", "pillow")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def hardware() -> dict[str, Any]:
    """What the run ran on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu, "machine": platform.machine()}
