"""The batched vision tower against the tower's own forward pass."""

import pytest
import torch
from models import game_prompt, random_frames
from torch import Tensor

from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.vision import vision_features


def towers_own(policy: QwenVL, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """(1 + D, visual tokens, hidden) of one picture, from the tower called as transformers calls it."""
    output = policy.tower(patches, grid_thw=torch.tensor([grid]))
    return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])])


# One frame stands for an image; 3 and 5 frames fill their last temporal patch with the last frame again.
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("width", "height"), [(16, 16), (48, 32), (32, 80)])
def test_features_are_those_of_the_towers_own_forward(policy: QwenVL, width: int, height: int, count: int) -> None:
    pictures = [random_frames(count, width, height, seed=seed) for seed in range(3)]
    patches, grid = policy.encode.patches(pictures), ((count + 1) // 2, height // 8, width // 8)
    with torch.no_grad():
        features = vision_features(policy.tower, patches, grid)
        for ours, picture in zip(features, patches, strict=True):
            # Features of size 3 after two float32 layers whose sums run in another order.
            torch.testing.assert_close(ours, towers_own(policy, picture, grid), rtol=0, atol=1e-5)


def test_deepstack_features_follow_the_merged_ones(policy: QwenVL) -> None:
    patches = policy.encode.patches([random_frames(2, 32, 32)])
    with torch.no_grad():
        features = vision_features(policy.tower, patches, (1, 4, 4))
    layers = len(getattr(policy.tower, "deepstack_visual_indexes", ()))
    assert layers == (1 if policy.core.config.model_type == "qwen3_vl" else 0)
    assert features.shape == (1, 1 + layers, 4, 64)


def test_pictures_of_many_shapes_come_back_in_their_order(policy: QwenVL) -> None:
    prompts = [
        policy.encode(game_prompt("video", random_frames(3, 32, 16, seed=1))),
        policy.encode(game_prompt("images", random_frames(2, 16, 48, seed=2))),
        policy.encode(game_prompt("images", random_frames(3, 32, 16, seed=3))),
        policy.encode(game_prompt("video", random_frames(3, 32, 16, seed=4))),
    ]
    with torch.no_grad():
        together = policy.vision(prompts)
        for prompt, features in zip(prompts, together, strict=True):
            expected = []
            for frames in prompt.visuals:
                height, width, _ = frames[0].pixels.shape
                grid = ((len(frames) + 1) // 2, height // 8, width // 8)
                expected.append(towers_own(policy, policy.encode.patches([frames])[0], grid))
            torch.testing.assert_close(features, torch.cat(expected, dim=1), rtol=0, atol=1e-5)


def test_gradients_are_those_of_the_towers_own_forward(policy: QwenVL) -> None:
    patches = policy.encode.patches([random_frames(3, 48, 32)])
    grid = (2, 4, 6)
    ours, theirs = (patches.clone().requires_grad_() for _ in range(2))
    features = vision_features(policy.tower, ours, grid)[0]
    weight = torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
    (features * weight).sum().backward()
    (towers_own(policy, theirs[0], grid) * weight).sum().backward()
    assert ours.grad is not None and ours.grad.abs().max() > 0.1
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
