"""Tiny random Qwen2.5-VL and Qwen3-VL checkpoints, prompts for them, and their answers without any code of this project.

transformers is imported inside the functions, so that tests of settings do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from grpo_agents.config import LoraConfig, PolicyConfig
from grpo_agents.rl.episode import Frame, ImagePart, Message, Prompt, TextPart, VideoPart

if TYPE_CHECKING:
    import torch

    from grpo_agents.policies.qwen_vl import QwenVL

Family = Literal["qwen2_5_vl", "qwen3_vl"]
FAMILIES: tuple[Family, ...] = ("qwen2_5_vl", "qwen3_vl")
KINDS: tuple[Literal["images", "video"], ...] = ("images", "video")
FPS = 5.0
# "left" and "up" become one token each, "right" and "press" several.
CORPUS = ["left right left fast up down press the button Keep the pole up. Move"] * 8


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    """One random checkpoint of each family. Read only."""
    from grpo_agents.policies.tiny import save_tiny

    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_tiny(root / family, family, CORPUS, vocab_size=320, seed=0)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="session")
def folder(family: Family, tiny_folders: dict[Family, Path]) -> Path:
    """Folder of the family's checkpoint. Read only."""
    return tiny_folders[family]


@pytest.fixture(scope="session")
def policy(folder: Path) -> QwenVL:
    """A policy whose adapter is far from new. Tests that change weights load their own."""
    return stirred(load(folder))


def load(folder: Path, *, rank: int = 4, targets: list[str] | None = None, seed: int = 0, **settings: Any) -> QwenVL:
    from grpo_agents.policies.qwen_vl import QwenVL

    lora = LoraConfig(rank=rank, target_modules=targets)
    adapter = settings.pop("adapter", None)
    config = PolicyConfig(model=str(folder), lora=lora, device="cpu", **settings)
    return QwenVL.load(config, seed=seed, adapter=adapter)


def stirred(policy: QwenVL, seed: int = 0) -> QwenVL:
    """The same policy, every trained weight moved as by a long training."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return policy


def random_frames(count: int, width: int = 32, height: int = 16, seed: int = 0) -> tuple[Frame, ...]:
    rng = np.random.default_rng(seed)
    return tuple(Frame(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for _ in range(count))


def game_prompt(
    kind: str, frames: tuple[Frame, ...], *, rules: str = "Keep the pole up.", question: str = "Move"
) -> Prompt:
    """Rules, frames, question, in the order in which the environments write them."""
    pictures: Iterable[Any] = map(ImagePart, frames) if kind == "images" else [VideoPart(frames, FPS)]
    return Prompt((Message("user", (TextPart(rules), *pictures, TextPart(question))),))


def processor_inputs(processor: Any, prompt: Prompt, completion: Iterable[int] = ()) -> dict[str, Any]:
    """A prompt and a reply as the model's inputs, made by the processor alone, with its own resizing."""
    import torch
    from transformers.video_utils import VideoMetadata

    images = [part.frame.pixels for part in prompt.visuals() if isinstance(part, ImagePart)]
    videos = [part for part in prompt.visuals() if isinstance(part, VideoPart)]
    extra: dict[str, Any] = {"images": images} if images else {}
    if videos:
        extra["videos"] = [np.stack([frame.pixels for frame in video.frames]) for video in videos]
        extra["video_metadata"] = [
            VideoMetadata(total_num_frames=len(v.frames), fps=v.fps, frames_indices=list(range(len(v.frames))))
            for v in videos
        ]
        extra["do_sample_frames"] = False
    text = processor.apply_chat_template(prompt.as_chat(), add_generation_prompt=True, tokenize=False)
    inputs = dict(processor(text=[text], return_tensors="pt", **extra))
    reply = torch.tensor([list(completion)], dtype=torch.long)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], reply], dim=1)
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        inputs[name] = torch.cat([inputs[name], torch.full_like(reply, value)], dim=1)
    return inputs


def plain_logits(model: Any, processor: Any, prompt: Prompt, completion: Iterable[int]) -> torch.Tensor:
    """Logits (tokens of the reply, vocabulary) of transformers' own forward pass on one whole sequence."""
    import torch

    completion = list(completion)
    with torch.no_grad():
        logits = model(**processor_inputs(processor, prompt, completion)).logits[0]
    return logits[-len(completion) - 1 : -1].float()
