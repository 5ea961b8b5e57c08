"""Prompts to tokens, positions and patches, against the model's own processor."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import FPS, KINDS, Family, game_prompt, load, processor_inputs, random_frames

from grpo_agents.errors import EnvironmentSetupError, RecordError
from grpo_agents.policies.encode import Encoder
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.rl.episode import Frame, ImagePart, Message, Prompt, TextPart, VideoPart

SIZES = [(16, 16), (32, 16), (48, 80)]  # width, height
COUNTS = [2, 3, 4]


def mixed_prompt() -> Prompt:
    """Two turns, with pictures of several sizes, kinds and rates between texts."""
    return Prompt(
        (
            Message("system", (TextPart("Keep the pole up."),)),
            Message(
                "user",
                (
                    ImagePart(random_frames(1, 48, 16, seed=1)[0]),
                    TextPart("left"),
                    VideoPart(random_frames(3, 32, 32, seed=2), FPS),
                    VideoPart(random_frames(4, 16, 48, seed=3), FPS),
                ),
            ),
            Message("assistant", (TextPart("right"),)),
            Message("user", (ImagePart(random_frames(1, 16, 64, seed=4)[0]), TextPart("Move"))),
        )
    )


PROMPTS = {
    f"{kind} {count} of {width}x{height}": game_prompt(kind, random_frames(count, width, height))
    for kind in KINDS
    for count in COUNTS
    for width, height in SIZES
} | {
    "one image": game_prompt("images", random_frames(1)),
    "mixed": mixed_prompt(),
    "text alone": Prompt((Message("user", (TextPart("Keep the pole up. Move"),)),)),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_positions_and_pixels_are_the_processors(policy: QwenVL, name: str) -> None:
    prompt = PROMPTS[name]
    expected = processor_inputs(policy.processor, prompt)
    encoded = policy.encode(prompt)
    layout = encoded.layout
    assert layout.ids.dtype == np.int64
    assert layout.ids.tolist() == expected["input_ids"][0].tolist()

    asked = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    positions, deltas = policy.core.model.get_rope_index(**{key: expected[key] for key in asked if key in expected})
    assert layout.position_ids.dtype == np.int64
    assert layout.position_ids.tolist() == positions[:, 0].tolist()
    assert layout.next_position == len(layout.ids) + int(deltas)

    for kind in ("image", "video"):
        patches = [
            policy.encode.patches([frames])[0]
            for frames, part in zip(encoded.visuals, prompt.visuals(), strict=True)
            if isinstance(part, ImagePart) == (kind == "image")
        ]
        if patches:
            ours, theirs = torch.cat(patches), expected["pixel_values" if kind == "image" else "pixel_values_videos"]
            # Values up to 3 in float32; one multiplication and one addition in another order.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PROMPTS)
def test_placeholders_are_as_many_as_the_grids_say(policy: QwenVL, name: str) -> None:
    encoded = policy.encode(PROMPTS[name])
    layout, merge = encoded.layout, policy.encode.merge
    visual = np.isin(layout.ids, [policy.encode.image_token_id, policy.encode.video_token_id])
    spans = np.zeros(len(layout.ids), dtype=bool)
    for span in layout.spans:
        assert span.count == np.prod(span.grid) // merge**2
        spans[span.start : span.start + span.count] = True
    assert (spans == visual).all()
    assert layout.prefix == (layout.spans[0].start if layout.spans else 0)
    needed = 0
    for frames in encoded.visuals:
        height, width, _ = frames[0].pixels.shape
        needed += (len(frames) + 1) // 2 * (height // 16) * (width // 16)
    assert visual.sum() == needed


@pytest.mark.parametrize(
    ("width", "height", "image", "video_of_3"), [(16, 16, 1, 2), (32, 48, 6, 12), (96, 64, 24, 48), (160, 16, 10, 20)]
)
def test_counts_of_image_tokens_are_pinned(
    policy: QwenVL, width: int, height: int, image: int, video_of_3: int
) -> None:
    frames = random_frames(3, width, height)
    assert sum(span.count for span in policy.encode(game_prompt("images", frames[:1])).layout.spans) == image
    assert sum(span.count for span in policy.encode(game_prompt("video", frames)).layout.spans) == video_of_3


def test_positions_by_hand_of_an_image_between_texts(policy: QwenVL) -> None:
    layout = policy.encode(game_prompt("images", random_frames(1, width=48, height=32))).layout
    (span,) = layout.spans
    a, rest = span.start, len(layout.ids) - span.start - 6
    after = [a + 3 + i for i in range(rest)]
    assert layout.position_ids.tolist() == [
        [*range(a), *[a] * 6, *after],
        [*range(a), *(a + row for row in (0, 0, 0, 1, 1, 1)), *after],
        [*range(a), *(a + column for column in (0, 1, 2, 0, 1, 2)), *after],
    ]
    assert layout.next_position == a + 3 + rest


@pytest.mark.parametrize(("fps", "later"), [(1.0, 8), (4.0, 2), (8.0, 1)])
def test_qwen2_5_places_the_frames_of_a_video_by_their_time(
    tiny_folders: dict[Family, Path], fps: float, later: int
) -> None:
    """A temporal patch of 2 frames lasts 2 / fps seconds, and the tiny model counts 4 positions a second."""
    encode = load(tiny_folders["qwen2_5_vl"]).encode
    layout = encode(Prompt((Message("user", (VideoPart(random_frames(4, 16, 16), fps),)),))).layout
    (span,) = layout.spans
    assert span.grid == (2, 2, 2)
    assert layout.position_ids[0, span.start : span.start + 2].tolist() == [span.start, span.start + later]


def test_qwen3_writes_the_time_of_each_temporal_patch(tiny_folders: dict[Family, Path]) -> None:
    policy = load(tiny_folders["qwen3_vl"])
    encoded = policy.encode(game_prompt("video", random_frames(5)))
    text = policy.processor.tokenizer.decode(encoded.layout.ids)
    # At 5 frames a second, the middles of frames 0 and 1, of 2 and 3, and of 4 twice.
    assert re.findall(r"<(\d+\.\d) seconds>", text) == ["0.1", "0.5", "0.8"]
    assert [span.grid for span in encoded.layout.spans] == [(1, 2, 4)] * 3


def test_prompts_that_differ_in_pixels_alone_share_one_layout(policy: QwenVL) -> None:
    first, second = (policy.encode(game_prompt("video", random_frames(2, seed=seed))) for seed in (0, 1))
    assert first.layout is second.layout
    assert first.observation_hash != second.observation_hash
    again = policy.encode(game_prompt("video", random_frames(2, seed=0)))
    assert again.observation_hash == first.observation_hash
    longer = policy.encode(game_prompt("video", random_frames(4)))
    other_words = policy.encode(game_prompt("video", random_frames(2), question="left"))
    assert len({id(encoded.layout) for encoded in (first, longer, other_words)}) == 3


def test_the_rate_of_a_video_is_part_of_its_layout(policy: QwenVL) -> None:
    frames = random_frames(4)
    slow, fast = (policy.encode(Prompt((Message("user", (VideoPart(frames, fps),)),))) for fps in (1.0, 4.0))
    assert (slow.fps, fast.fps) == (1.0, 4.0)
    # Qwen3-VL writes times into the text, Qwen2.5-VL counts them in the positions.
    slow_is, fast_is = ((e.layout.ids.tolist(), e.layout.position_ids.tolist()) for e in (slow, fast))
    assert slow_is != fast_is


def test_patches_of_many_pictures_are_those_of_each_alone(policy: QwenVL) -> None:
    videos = [random_frames(3, 48, 32, seed=seed) for seed in range(4)]
    together = policy.encode.patches(videos)
    assert together.shape == (4, 2 * 4 * 6, 3 * 2 * 8 * 8)
    for patches, video in zip(together, videos, strict=True):
        assert torch.equal(patches, policy.encode.patches([video])[0])


def test_patches_do_not_depend_on_how_frames_lie_in_memory(policy: QwenVL) -> None:
    (frame,) = random_frames(1, 48, 32)
    mirrored = Frame(np.ascontiguousarray(frame.pixels[:, ::-1])[:, ::-1])
    assert not mirrored.pixels.flags.c_contiguous
    assert torch.equal(policy.encode.patches([(mirrored,)]), policy.encode.patches([(frame,)]))


@pytest.mark.parametrize("patch_size", [14, 16])
def test_patches_of_the_released_models_sizes_are_the_processors(patch_size: int) -> None:
    """Qwen2.5-VL has patches of 14 pixels and Qwen3-VL of 16; the tiny ones have 8."""
    from grpo_agents.policies.tiny import build_processor, train_tokenizer

    processor: Any = build_processor(train_tokenizer(["left right"], 300), "qwen3_vl", patch_size)
    processor.image_processor.image_mean = [0.48, 0.45, 0.40]
    processor.image_processor.image_std = [0.27, 0.26, 0.28]
    (frame,) = random_frames(1, 6 * patch_size, 4 * patch_size)
    expected = processor.image_processor(images=[frame.pixels], return_tensors="pt")["pixel_values"]
    patches = Encoder(processor, None).patches([(frame,)])[0]
    torch.testing.assert_close(patches, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "height", "near"), [(40, 16, "32,16"), (16, 42, "16,48"), (5, 100, "16,96")])
def test_a_frame_that_does_not_divide_into_patches_is_refused_with_the_nearest_size(
    policy: QwenVL, kind: str, width: int, height: int, near: str
) -> None:
    message = (
        f"a frame of {width}x{height} pixels does not divide into this model's patches: both sides must be multiples "
        f"of 16. Set env.frames.size={near}"
    )
    with pytest.raises(EnvironmentSetupError, match=f"^{re.escape(message)}$"):
        policy.encode(game_prompt(kind, random_frames(2, width, height)))


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
@pytest.mark.parametrize("place", ["rules", "question"])
@pytest.mark.parametrize("kind", KINDS)
def test_placeholder_tokens_in_the_text_are_refused(policy: QwenVL, kind: str, place: str, token: str) -> None:
    prompt = game_prompt(kind, random_frames(2, 16, 16), **{place: f"what is {token}?"})
    with pytest.raises(RecordError, match="placeholder tokens that belong to no picture"):
        policy.encode(prompt)
    with pytest.raises(RecordError, match="placeholder tokens that belong to no picture"):
        policy.encode(Prompt((Message("user", (TextPart(f"what is {token}?"),)),)))


def test_the_assistants_header_opens_a_reply(policy: QwenVL) -> None:
    prompt = game_prompt("images", random_frames(1))
    closed, opened = (policy.encode.encode(prompt, add_generation_prompt=opened) for opened in (False, True))
    header = policy.encode.assistant_header
    assert policy.processor.tokenizer.decode(header) == "<|im_start|>assistant\n"
    assert opened.layout.ids.tolist() == [*closed.layout.ids.tolist(), *header.tolist()]
