"""An encoded prompt in the form in which vLLM's engine takes it: nothing is tokenised, resized or normalised again.

vLLM would rather be given text or unexpanded tokens and raw pictures, and would make token ids and patches of them with a
processor of its own. Here it gets what the learner has: the final token ids, the pixels of the final patches, and the
places where the patches' features go. The pixels are bytes, and vLLM's model normalises them as its first step
(`mm_device_do_normalize`), with the mean and the deviation of the same processor.

Each run of placeholder tokens is one item. One temporal patch is an image to vLLM, also where it is a part of a video (as
in Qwen3-VL, whose prompts have a timestamp between the temporal patches of a video): vision features and positions are
those of an image of the same size. Several temporal patches in one run (Qwen2.5-VL) are a video.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_agents.errors import RecordError
from grpo_agents.policies.encode import Encoder
from grpo_agents.rl.episode import Encoded, Frame, VisualSpan

_RAW_VIEW = 3
"""Code of the msgpack extension type in which vLLM's serializer keeps the bytes of a tensor."""


@dataclass(frozen=True, eq=False)
class Picture:
    """One item of a prompt.

    Attributes:
        modality: "image" or "video", vLLM's name for the kind of item.
        span: its placeholder tokens.
        frames: what it shows.
        seconds: seconds between two temporal patches of a video; None where there is one temporal patch.
        digest: hex digest over frames and kind: equal pictures, and only those, have equal digests.
    """

    modality: str
    span: VisualSpan
    frames: tuple[Frame, ...]
    seconds: float | None
    digest: str

    def tensors(self, encoder: Encoder) -> dict[str, tuple[Tensor, bool]]:
        """The model's inputs by name, and whether each holds one row a patch (otherwise one value a picture)."""
        patches = encoder.raw_patches([self.frames])[0]
        grid = torch.tensor(self.span.grid)
        if self.modality == "image":
            return {"pixel_values": (patches, True), "image_grid_thw": (grid, False)}
        inputs = {"pixel_values_videos": (patches, True), "video_grid_thw": (grid, False)}
        if self.seconds is not None:
            inputs["second_per_grid_ts"] = (torch.tensor(self.seconds), False)
        return inputs


def pictures(encoded: Encoded, encoder: Encoder) -> list[Picture]:
    """The items of a prompt in order.

    Raises:
        RecordError: the prompt's placeholder tokens are not those of its pictures.
    """
    found: list[Picture] = []
    spans = iter(encoded.layout.spans)
    for visual in encoded.visuals:
        wanted = -(-len(visual) // encoder.temporal)
        done = 0
        while done < wanted:
            span = next(spans, None)
            if span is None:
                raise RecordError("a prompt has more pictures than runs of placeholder tokens")
            count = span.grid[0]
            frames = visual[done * encoder.temporal : (done + count) * encoder.temporal]
            found.append(_picture(span, frames, encoded.fps, encoder))
            done += count
    if next(spans, None) is not None:
        raise RecordError("a prompt has more runs of placeholder tokens than pictures")
    return found


def _picture(span: VisualSpan, frames: tuple[Frame, ...], fps: float | None, encoder: Encoder) -> Picture:
    t, h, w = span.grid
    height, width = frames[0].pixels.shape[:2]
    if (h * encoder.patch, w * encoder.patch) != (height, width) or t * h * w != span.count * encoder.merge**2:
        raise RecordError(
            f"a picture of {width}x{height} pixels stands at {span.count} placeholder tokens of a grid {span.grid}"
        )
    modality, seconds = ("image", None) if t == 1 else ("video", encoder.temporal / (fps or 1.0))
    digest = hashlib.blake2b(f"{modality} {span.grid} {seconds}".encode(), digest_size=16)
    for frame in frames:
        digest.update(frame.digest)
    return Picture(modality, span, frames, seconds, digest.hexdigest())


def engine_input(encoded: Encoded, tokens: tuple[int, ...], encoder: Encoder) -> Any:
    """The prompt and the tokens after it for vLLM's engine in this process."""
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    ids = [*encoded.layout.ids.tolist(), *tokens]
    items = pictures(encoded, encoder)
    if not items:
        return tokens_input(ids)
    inputs: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[Any]] = {}
    for item in items:
        fields = {
            name: MultiModalFieldElem(
                data=tensor,
                field=MultiModalFlatField(slices=[slice(0, len(tensor))])
                if by_patch
                else MultiModalBatchedField(keep_on_cpu=True),
            )
            for name, (tensor, by_patch) in item.tensors(encoder).items()
        }
        inputs.setdefault(item.modality, []).append(MultiModalKwargsItem(fields))
        hashes.setdefault(item.modality, []).append(item.digest)
        places.setdefault(item.modality, []).append(PlaceholderRange(offset=item.span.start, length=item.span.count))
    return mm_input(ids, MultiModalKwargsItems(inputs), hashes, places)


def wire_features(encoded: Encoded, encoder: Encoder) -> dict[str, Any] | None:
    """The pictures of a prompt as the `features` of a request to a server's /inference/v1/generate."""
    features: dict[str, dict[str, list[Any]]] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    for item in pictures(encoded, encoder):
        packed = _pack(
            {
                name: {
                    "data": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _bytes(tensor)],
                    "field": ["flat", {"keep_on_cpu": False, "slices": [[0, len(tensor), None]], "dim": 0}]
                    if by_patch
                    else ["batched", {"keep_on_cpu": True}],
                }
                for name, (tensor, by_patch) in item.tensors(encoder).items()
            }
        )
        place = {"offset": item.span.start, "length": item.span.count}
        for name, value in (
            ("mm_hashes", item.digest),
            ("mm_placeholders", place),
            ("kwargs_data", base64.b64encode(packed).decode()),
        ):
            features[name].setdefault(item.modality, []).append(value)
    return features if features["mm_hashes"] else None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _pack(value: Any) -> bytes:
    """Msgpack of what a picture's fields are made of; bytes become the extension type of vLLM's tensors.

    Written out so that a client of a server needs no vLLM, whose import takes longer than many a session.
    """
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return b"\xd3" + struct.pack(">q", value)
    if isinstance(value, str):
        text = value.encode()
        return b"\xdb" + struct.pack(">I", len(text)) + text
    if isinstance(value, bytes):
        return b"\xc9" + struct.pack(">IB", len(value), _RAW_VIEW) + value
    if isinstance(value, dict):
        pairs = b"".join(_pack(key) + _pack(item) for key, item in value.items())
        return b"\xdf" + struct.pack(">I", len(value)) + pairs
    return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(_pack, value))
