"""Prompts to token ids and pixels, once, with the model's own processor; and pixels to patches.

A prompt's tokens depend on its text and on the sizes of its pictures, not on their pixels. So each distinct layout is
tokenised once and shared; a game's five hundred steps reuse one. Frames arrive at their final size: nothing is resized
here, and a size that the processor would change is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.video_utils import VideoMetadata

from grpo_agents.errors import EnvironmentSetupError, RecordError
from grpo_agents.rl.episode import Encoded, Frame, ImagePart, Layout, Prompt, VideoPart, VisualSpan

_KEPT_LAYOUTS = 4096
VisualKey = tuple[str, int, tuple[int, ...], float | None]


class Encoder:
    """Encodes prompts for one model.

    Args:
        processor: the model's `AutoProcessor`.
        rope_index: the model's own `get_rope_index`, the source of M-RoPE positions.
    """

    def __init__(self, processor: Any, rope_index: Any):
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self._rope_index = rope_index
        image = processor.image_processor
        self.patch, self.merge = int(image.patch_size), int(image.merge_size)
        self.temporal = int(image.temporal_patch_size)
        mean, std = (np.array(x, dtype=np.float64).reshape(3, 1) for x in (image.image_mean, image.image_std))
        self._scale = torch.from_numpy((1.0 / (255.0 * std)).astype(np.float32))  # (x / 255 - mean) / std
        self._shift = torch.from_numpy((-mean / std).astype(np.float32))
        vocabulary = self.tokenizer.convert_tokens_to_ids
        self.image_token, self.video_token = str(processor.image_token), str(processor.video_token)
        self.image_token_id, self.video_token_id = vocabulary(self.image_token), vocabulary(self.video_token)
        self._layouts: dict[tuple[str, tuple[VisualKey, ...]], Layout] = {}
        self._texts: dict[tuple[Any, ...], str] = {}
        self._expansions: dict[VisualKey, tuple[str, dict[str, Any]]] = {}
        self._positions: dict[tuple[Any, ...], np.ndarray] = {}

    @property
    def factor(self) -> int:
        """Frame sides must be multiples of this many pixels: patch size times merge size."""
        return self.patch * self.merge

    @cached_property
    def assistant_header(self) -> np.ndarray:
        """Token ids that open an assistant's turn."""
        chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        texts = [
            self.processor.apply_chat_template(chat, add_generation_prompt=opened, tokenize=False)
            for opened in (False, True)
        ]
        header = self.tokenizer(texts[1][len(texts[0]) :], add_special_tokens=False).input_ids
        return np.array(header, dtype=np.int64)

    def __call__(self, prompt: Prompt) -> Encoded:
        """Encode a prompt with the opening of the assistant's turn.

        Raises:
            EnvironmentSetupError: a frame's size is not one that the model takes unchanged.
        """
        return self.encode(prompt, add_generation_prompt=True)

    def encode(self, prompt: Prompt, *, add_generation_prompt: bool) -> Encoded:
        """Encode a prompt, with or without the opening of the assistant's turn."""
        visuals = prompt.visuals()
        keys = tuple(_visual_key(visual) for visual in visuals)
        text = self._text(prompt, add_generation_prompt)
        layout = self._layouts.get((text, keys))
        if layout is None:
            if len(self._layouts) >= _KEPT_LAYOUTS:  # conversations: each its own layout, none seen again
                self._layouts.clear()
                self._texts.clear()
            layout = self._layouts[text, keys] = self._lay_out(text, keys)
        frames = tuple((v.frame,) if isinstance(v, ImagePart) else v.frames for v in visuals)
        fps = next((v.fps for v in visuals if isinstance(v, VideoPart)), None)
        return Encoded(layout, frames, fps)

    def _text(self, prompt: Prompt, add_generation_prompt: bool) -> str:
        signature = (
            add_generation_prompt,
            *((m.role, *(getattr(part, "text", type(part)) for part in m.parts)) for m in prompt.messages),
        )
        text = self._texts.get(signature)
        if text is None:
            text = self._texts[signature] = self.processor.apply_chat_template(
                prompt.as_chat(), add_generation_prompt=add_generation_prompt, tokenize=False
            )
        return text

    def _lay_out(self, text: str, keys: tuple[VisualKey, ...]) -> Layout:
        pieces, grids = [], []
        rest = text
        for key in keys:
            token = self.image_token if key[0] == "image" else self.video_token
            before, found, rest = rest.partition(token)
            if not found:
                raise RecordError(f"the chat template wrote fewer {token} than the prompt has pictures: {text!r}")
            expansion, grid = self._expand(key)
            pieces += [before, expansion]
            grids.append(grid)
        ids = np.array(self.tokenizer("".join([*pieces, rest]), add_special_tokens=False).input_ids, dtype=np.int64)
        spans = self._spans(ids, grids)
        # Positions depend on where the pictures stand and how large they are, not on the words between them.
        shape = (len(ids), tuple((span.start, span.grid) for span in spans), tuple(key[3] for key in keys))
        positions = self._positions.get(shape)
        if positions is None:
            positions = self._positions[shape] = self._rope(ids, grids)
        prefix = spans[0].start if spans else 0
        return Layout(ids, positions, spans, prefix)

    def _expand(self, key: VisualKey) -> tuple[str, dict[str, Any]]:
        """The text that the processor puts in the place of one picture, and the grid entries that belong to it."""
        if key not in self._expansions:
            kind, count, shape, fps = key
            height, width = shape
            if height % self.factor or width % self.factor:
                near = [max(self.factor, round(side / self.factor) * self.factor) for side in (width, height)]
                raise EnvironmentSetupError(
                    f"a frame of {width}x{height} pixels does not divide into this model's patches: both sides must be "
                    f"multiples of {self.factor}. Set env.frames.size={near[0]},{near[1]}"
                )
            blank = np.zeros((count, height, width, 3), dtype=np.uint8)
            token = self.image_token if kind == "image" else self.video_token
            if kind == "image":
                output = self.processor(text=[token], images=[blank[0]], do_resize=False, return_tensors="pt")
            else:
                metadata = VideoMetadata(
                    total_num_frames=count,
                    fps=fps,
                    width=width,
                    height=height,
                    duration=count / (fps or 1.0),
                    frames_indices=list(range(count)),
                )
                output = self.processor(
                    text=[token],
                    videos=[blank],
                    video_metadata=[metadata],
                    do_resize=False,
                    do_sample_frames=False,
                    return_tensors="pt",
                )
            names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            text = self.tokenizer.decode(output["input_ids"][0], skip_special_tokens=False)
            self._expansions[key] = text, {name: output[name] for name in names if name in output}
        return self._expansions[key]

    def _spans(self, ids: np.ndarray, grids: list[dict[str, Any]]) -> tuple[VisualSpan, ...]:
        """Runs of placeholder tokens, matched with the grids of the pictures they stand for."""
        visual = (ids == self.image_token_id) | (ids == self.video_token_id)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], visual.astype(np.int8), [0]])))
        runs = [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]
        spans: list[VisualSpan] = []
        remaining = iter(runs)
        for grid in grids:
            t, h, w = (int(x) for x in grid["image_grid_thw" if "image_grid_thw" in grid else "video_grid_thw"][0])
            per_frame = h * w // self.merge**2
            start, count = next(remaining, (0, 0))
            if count == t * per_frame:
                spans.append(VisualSpan(start, count, (t, h, w)))
                continue
            for frame in range(t):  # one run for each temporal patch
                if frame:
                    start, count = next(remaining, (0, 0))
                if count != per_frame:
                    raise RecordError(
                        f"a picture of {t}x{h}x{w} patches needs {per_frame} placeholder tokens a frame; the prompt has a "
                        f"run of {count}"
                    )
                spans.append(VisualSpan(start, count, (1, h, w)))
        if next(remaining, None) is not None:
            raise RecordError("the prompt's text holds placeholder tokens that belong to no picture")
        return tuple(spans)

    def _rope(self, ids: np.ndarray, grids: list[dict[str, Any]]) -> np.ndarray:
        if not grids:
            return np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()
        names = {name for grid in grids for name in grid}
        joined = {
            name: torch.cat([torch.as_tensor(grid[name]) for grid in grids if name in grid]) for name in sorted(names)
        }
        tokens = torch.from_numpy(ids)[None]
        kinds = (tokens == self.image_token_id).int() + 2 * (tokens == self.video_token_id).int()
        positions, _ = self._rope_index(tokens, mm_token_type_ids=kinds, **joined)
        return positions[:, 0].numpy().astype(np.int64)

    def patches(self, visuals: Sequence[tuple[Frame, ...]]) -> Tensor:
        """Normalised patches of N pictures of one shape, in the order the vision tower expects.

        Args:
            visuals: N pictures, each one frame (an image, repeated in time) or the T frames of a video.

        Returns:
            float32 (N, t * h * w, 3 * temporal * patch * patch), equal to what the processor makes of the same frames.
        """
        pixels = self.raw_patches(visuals).unflatten(2, (3, -1)).to(torch.float32)
        return pixels.mul_(self._scale).add_(self._shift).flatten(2)

    def raw_patches(self, visuals: Sequence[tuple[Frame, ...]]) -> Tensor:
        """The same patches before they are normalised: uint8 (N, t * h * w, 3 * temporal * patch * patch)."""
        frames = np.stack([np.stack([frame.pixels for frame in visual]) for visual in visuals])
        n, count, height, width, _ = frames.shape
        if count % self.temporal:
            last = np.repeat(frames[:, -1:], self.temporal - count % self.temporal, axis=1)
            frames = np.concatenate([frames, last], axis=1)
        t, m, p = frames.shape[1] // self.temporal, self.merge, self.patch
        h, w = height // p, width // p
        # Planar first, then whole rows of a patch at a time: copying eight bytes as one number is several times faster.
        planar = np.ascontiguousarray(frames.transpose(0, 1, 4, 2, 3))
        row = np.dtype(f"V{p}") if p not in (1, 2, 4, 8) else np.dtype(f"u{p}")
        rows = planar.view(row).reshape(n, t, self.temporal, 3, h // m, m, p, w // m, m)
        ordered = np.ascontiguousarray(rows.transpose(0, 1, 4, 7, 5, 8, 3, 2, 6))
        return torch.from_numpy(ordered.view(np.uint8)).view(n, t * h * w, -1)


def _visual_key(visual: ImagePart | VideoPart) -> VisualKey:
    if isinstance(visual, ImagePart):
        return "image", 1, visual.frame.pixels.shape[:2], None
    return "video", len(visual.frames), visual.frames[0].pixels.shape[:2], visual.fps
