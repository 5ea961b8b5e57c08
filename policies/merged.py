"""A policy's weights with the adapter's part added to them: for whoever takes whole models only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from grpo_agents.policies.qwen_vl import QwenVL


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


def save_merged(policy: QwenVL, folder: Path) -> None:
    """Write a whole model with its processor, as `save_pretrained` does for one that never had an adapter."""
    policy.core.save_pretrained(str(folder), state_dict=dict(merged_weights(policy)))
    policy.processor.save_pretrained(str(folder))
