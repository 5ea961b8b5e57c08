"""Chats from JSONL files: one conversation a line, in the form that chat templates and qwen-vl-utils take.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "frames/0.png"},
                                               {"type": "text", "text": "pole?"}]},
                  {"role": "assistant", "content": "E"}]}

A video is a list of frame files: `{"type": "video", "video": ["0.png", "1.png"], "fps": 12.5}`. Paths are relative to the
JSONL file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from grpo_agents.errors import ConfigError
from grpo_agents.rl.episode import Frame, ImagePart, Message, Part, Prompt, TextPart, VideoPart


def read_chats(data: str) -> list[Prompt]:
    """Read conversations.

    Args:
        data: path of a JSONL file; `path#N` reads the first N lines.

    Raises:
        ConfigError: the file is missing or a line is no chat; the first ten bad lines are named.
    """
    name, _, first = data.partition("#")
    path = Path(name)
    if not path.is_file():
        raise ConfigError([f"data={data}: there is no file {path}"])
    if first and not first.isdigit():
        raise ConfigError([f"data={data}: after # stands the number of lines to read, not {first!r}"])
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chats, problems = [], []
    for number, line in enumerate(lines[: int(first)] if first else lines, start=1):
        try:
            chats.append(_prompt(json.loads(line)["messages"], path.parent))
        except (ValueError, KeyError, TypeError, OSError) as error:
            problems.append(f"{path}, line {number}: {type(error).__name__}: {error}")
            if len(problems) == 10:
                break
    if problems:
        raise ConfigError(problems)
    if not chats:
        raise ConfigError([f"data={data}: the file holds no conversation"])
    return chats


def _prompt(messages: list[dict[str, Any]], folder: Path) -> Prompt:
    return Prompt(tuple(Message(str(m["role"]), _parts(m["content"], folder)) for m in messages))


def _parts(content: Any, folder: Path) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    parts: list[Part] = []
    for item in content:
        if item["type"] == "text":
            parts.append(TextPart(item["text"]))
        elif item["type"] == "image":
            parts.append(ImagePart(_frame(folder / item["image"])))
        elif item["type"] == "video":
            parts.append(VideoPart(tuple(_frame(folder / name) for name in item["video"]), float(item.get("fps", 2.0))))
        else:
            raise ValueError(f"a part has the type {item['type']!r}; known are text, image and video")
    return tuple(parts)


def _frame(path: Path) -> Frame:
    with Image.open(path) as picture:
        return Frame(np.asarray(picture.convert("RGB")))
