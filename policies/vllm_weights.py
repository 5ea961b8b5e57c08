"""What a sampler that holds its own copy of the weights has to be given after an update."""

from __future__ import annotations

import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from grpo_agents.policies.qwen_vl import QwenVL

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be told to make room for."""


@dataclass(frozen=True)
class Adapter:
    """A saved adapter.

    Attributes:
        number: counts the adapters of a run; never used twice.
        name: never used twice either, also not by another run at the same server. What a server has cached under a name
            therefore belongs to these weights.
        path: its folder.
    """

    number: int
    name: str
    path: Path


class AdapterStore:
    """Saves each version of the policy's adapter under a new number and name.

    Args:
        policy: the model that learns.
        root: folder for the adapters' folders; None for a temporary one.
    """

    def __init__(self, policy: QwenVL, root: str | None = None):
        self.policy = policy
        self._temporary = tempfile.TemporaryDirectory(prefix="grpo_agents-adapters-") if root is None else None
        self.root = Path(self._temporary.name if self._temporary else str(root)).resolve()
        self._run = uuid.uuid4().hex[:12]
        self._number = 0

    def owns(self, name: str) -> bool:
        """Whether an adapter's name was given by this store."""
        return name.startswith(f"{self._run}-")

    def save(self) -> Adapter | None:
        """Save the adapter as it is now; None while it is switched off, which is the base model."""
        if not adapter_is_on(self.policy):
            return None
        self._number += 1
        name = f"{self._run}-{self._number:06d}"
        adapter = Adapter(self._number, name, self.root / name)
        self.policy.save(adapter.path)
        return adapter


def adapter_is_on(policy: QwenVL) -> bool:
    """Whether the policy computes with its adapter: not within `policy.reference()`, and not where it has none."""
    layers = [module for module in policy.core.modules() if isinstance(module, BaseTunerLayer)]
    return bool(layers) and not layers[0].disable_adapters


def merged_weights(policy: QwenVL) -> list[tuple[str, Tensor]]:
    """All weights under the names of a checkpoint, the adapter's part added to what it adapts.

    Nothing is changed in the policy itself: merging and unmerging in place would leave rounding errors in the base weights.
    An output embedding that is tied to the input embedding is listed too: vLLM may keep a packed copy of it.
    """
    layers = {name: module for name, module in policy.core.named_modules() if isinstance(module, BaseTunerLayer)}
    on = adapter_is_on(policy)
    weights = []
    for name, tensor in policy.core.state_dict().items():
        if ".lora_" in name:
            continue
        owner, _, kind = name.rpartition(".base_layer.")
        layer: Any = layers.get(owner)
        if layer is not None:
            name = f"{owner}.{kind}"
            if on and kind == "weight":
                tensor = tensor + layer.get_delta_weight("default").to(tensor.dtype)
        weights.append((name, tensor.detach()))
    return weights
