"""Tiny Qwen-VL checkpoints from nothing: real configurations, tokenizers, processors and weights, a few hundred kilobytes.

`assets/tiny-qwen-vl` is one of them after supervised training (`experiments/build_tiny_qwen_vl.py`); the tests use random
ones of both families. They are read by `AutoModelForImageTextToText` and `AutoProcessor` like any download, and nothing in
the package treats them specially.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2TokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

Family = Literal["qwen2_5_vl", "qwen3_vl"]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# Qwen's split of text before byte-pair merges: contractions, words with one leading space or sign, single digits, runs of
# signs, line ends, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- macro content(parts) -%}
{%- if parts is string -%}{{- parts -}}
{%- else -%}
{%- for part in parts -%}
{%- if part.type == 'image' or 'image' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- content(messages[0].content) + '\\n' -}}{%- endif -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\nCall one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + content(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + content(message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
{{- '<tool_call>' + ({'name': function.name, 'arguments': function.arguments} | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>' + content(message.content) + '</tool_response><|im_end|>\\n' -}}
{%- elif message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' + content(message.content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(texts: list[str], vocab_size: int) -> Qwen2TokenizerFast:
    """Train a byte-level BPE with Qwen's special tokens; every byte is a token, so any text can be written.

    Args:
        texts: the corpus; frequent words become single tokens.
        vocab_size: most tokens, special ones included; the result can be smaller where the corpus is.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(SPECIAL_TOKENS) + len(PLAIN_ADDED_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    fast = Qwen2TokenizerFast(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        additional_special_tokens=list(SPECIAL_TOKENS),
    )
    fast.add_tokens(list(PLAIN_ADDED_TOKENS))
    return fast


def build_processor(
    tokenizer: Qwen2TokenizerFast, family: Family, patch_size: int = 8, max_pixels: int = 1 << 20
) -> Any:
    """A Qwen-VL processor whose zero is white: most Gymnasium worlds are drawn on white, and a tiny model learns from
    what differs from zero. Black is -3, the range that Qwen's own normalisation spans."""
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    common = {
        "image_mean": [1.0, 1.0, 1.0],
        "image_std": [1 / 3, 1 / 3, 1 / 3],
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (2 * patch_size) ** 2, "longest_edge": max_pixels},
    }
    image = Qwen2VLImageProcessor(**common)
    if family == "qwen3_vl":
        video = Qwen3VLVideoProcessor(**common, cap_pixels_per_frame=False, min_frames=2)
        return Qwen3VLProcessor(
            image_processor=image, tokenizer=tokenizer, video_processor=video, chat_template=CHAT_TEMPLATE
        )
    video = Qwen2VLVideoProcessor(**common, cap_pixels_per_frame=False, min_frames=2)
    return Qwen2_5_VLProcessor(
        image_processor=image, tokenizer=tokenizer, video_processor=video, chat_template=CHAT_TEMPLATE
    )


def build_model(tokenizer: Qwen2TokenizerFast, family: Family, seed: int = 0, hidden: int = 64) -> PreTrainedModel:
    """A random Qwen-VL of 2 vision and 2 text layers, about 430,000 parameters at hidden size 64.

    Weights are normal with standard deviation 1/sqrt(fan-in): the usual 0.02 is made for wide layers and is far too small
    here. Half of the patch filters are antisymmetric in time, so that motion between the two frames of a temporal patch is
    seen from the start.
    """
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    heads, head_dim = 4, hidden // 4
    third = head_dim // 2 // 4
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [head_dim // 2 - 2 * third, third, third]}
    vision = {
        "depth": 2,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "hidden_act": "relu",  # GELU alone would be a seventh of the tower's time on a CPU
        "num_heads": heads,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "in_channels": 3,
    }
    model: PreTrainedModel
    if family == "qwen3_vl":
        text |= {"head_dim": head_dim, "rope_parameters": rope | {"mrope_interleaved": True}}
        vision |= {"num_position_embeddings": 144, "deepstack_visual_indexes": [0]}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids))
    else:
        text |= {"rope_parameters": rope}
        vision |= {"window_size": 32, "fullatt_block_indexes": [1], "tokens_per_second": 4}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    _initialize(model, seed)
    return model.eval()


@torch.no_grad()
def _initialize(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            module.weight.normal_(0.0, 1.0 / math.sqrt(module.weight[0].numel()), generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, 1.0 / math.sqrt(module.weight.shape[1]), generator=generator)
    model.tie_weights()
    filters = model.model.visual.patch_embed.proj.weight  # (hidden, channels, 2, patch, patch)
    moving = filters[: filters.shape[0] // 2]
    difference = (moving[:, :, 1] - moving[:, :, 0]) / math.sqrt(2.0)
    moving.copy_(2.5 * torch.stack([-difference, difference], dim=2))


def save_tiny(folder: Path, family: Family, texts: list[str], *, vocab_size: int = 1024, seed: int = 0) -> None:
    """Write a random tiny checkpoint (config, weights, tokenizer, processor, chat template) to `folder`."""
    tokenizer = train_tokenizer(texts, vocab_size)
    build_model(tokenizer, family, seed).save_pretrained(folder)
    build_processor(tokenizer, family).save_pretrained(folder)
