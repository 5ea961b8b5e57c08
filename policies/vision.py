"""Vision features of many equal pictures at once.

transformers runs the vision tower's attention image by image outside flash attention, and rebuilds positions in every
call. Frames of a game are all of one size, so attention here is one batched call over (pictures, patches). For Qwen3-VL
the tower's own layers are called in the tower's own order; other families use the tower's forward as it is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids


def vision_features(tower: nn.Module, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Features of N pictures of one grid.

    Args:
        tower: the model's `visual`.
        patches: (N, t * h * w, patch values), as `Encoder.patches` returns them.
        grid: (t, h, w) in patches.

    Returns:
        (N, 1 + D, t * h * w / merge**2, hidden): the merged features, then those of D DeepStack layers (none in
        Qwen2.5-VL).
    """
    if isinstance(tower, Qwen3VLVisionModel):
        return _qwen3_vl(tower, patches, grid)
    n = patches.shape[0]
    output: Any = tower(
        patches.flatten(0, 1).to(next(tower.parameters()).dtype),
        grid_thw=torch.tensor([grid] * n, device=patches.device),
        return_dict=True,
    )
    stacked = torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())])
    return stacked.view(stacked.shape[0], n, -1, stacked.shape[-1]).transpose(0, 1)


@lru_cache(maxsize=64)
def _positions(grid: tuple[int, int, int], side: int, merge: int) -> tuple[Tensor, Tensor, Tensor]:
    grid_thw = torch.tensor([(1, *grid[1:])])
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid_thw, num_grid_per_side=side, mode="bilinear", align_corners=True, spatial_merge_size=merge
    )
    return indices, weights, get_vision_position_ids(grid_thw, merge)


def _qwen3_vl(tower: Any, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    n, (t, h, w) = patches.shape[0], grid
    projection = tower.patch_embed.proj
    device, dtype = projection.weight.device, projection.weight.dtype
    indices, weights, position_ids = (
        x.to(device) for x in _positions(grid, tower.num_grid_per_side, tower.spatial_merge_size)
    )
    # A convolution whose stride is its kernel is a linear map of each patch.
    hidden = F.linear(patches.to(device, dtype), projection.weight.flatten(1), projection.bias)
    learned = (tower.pos_embed(indices) * weights[:, :, None]).sum(1).to(dtype)
    hidden = hidden.view(n * t, h * w, -1) + learned  # attention stays within one temporal patch
    cos, sin = (x[:, None, None, : x.shape[-1] // 2] for x in tower.rotary_pos_emb(hidden, position_ids))
    deepstack = []
    for index, block in enumerate(tower.blocks):
        if block.gradient_checkpointing:
            hidden = checkpoint(_block, block, hidden, cos, sin, use_reentrant=False)
        else:
            hidden = _block(block, hidden, cos, sin)
        if index in tower.deepstack_visual_indexes:
            merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(index)]
            deepstack.append(merger(hidden))
    stacked = torch.stack([tower.merger(hidden), *deepstack])
    return stacked.view(stacked.shape[0], n, -1, stacked.shape[-1]).transpose(0, 1)


def _block(block: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One layer of the tower on (pictures, patches, hidden); every patch of a picture sees all others."""
    n, patches, _ = hidden.shape
    attention = block.attn
    qkv = attention.qkv(block.norm1(hidden)).view(n, patches, 3, attention.num_heads, -1)
    query, key = _rotate(qkv[:, :, :2], cos, sin).unbind(2)
    value = qkv[:, :, 2]
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=attention.scaling
    )
    hidden = hidden + attention.proj(mixed.transpose(1, 2).flatten(2))
    return hidden + block.mlp(block.norm2(hidden))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions for queries and keys together; x is (..., patches, 2, heads, d), cos and sin (patches, 1, 1, d/2)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
