"""Chats from JSONL files: one conversation a line, in the form that chat templates and qwen-vl-utils take.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "frames/0.png"},
                                               {"type": "text", "text": "pole?"}]},
                  {"role": "assistant", "content": "E"}]}

A video is a list of frame files: `{"type": "video", "video": ["0.png", "1.png"], "fps": 12.5}`. Paths are relative to the
JSONL file. Blank lines are passed over.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from grpo_agents.errors import ConfigError
from grpo_agents.rl.episode import Frame, ImagePart, Message, Part, Prompt, TextPart, VideoPart

T = TypeVar("T")

_MOST_PROBLEMS = 10


def read_chats(data: str) -> list[Prompt]:
    """Read conversations.

    Args:
        data: path of a JSONL file; `path#N` reads the first N conversations.

    Raises:
        ConfigError: the file is missing or a line is no chat with a turn to learn; the first ten bad lines are named.
    """
    name, _, first = data.partition("#")
    path = Path(name)
    if not path.is_file():
        raise ConfigError([f"data={data}: there is no file {path}"])
    if first and not (first.isdigit() and int(first)):
        raise ConfigError([f"data={data}: after # stands the number of conversations to read, not {first!r}"])
    chats, problems = [], []
    with path.open(encoding="utf-8") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        for number, line in itertools.islice(lines, int(first) if first else None):
            try:
                chats.append(_chat(line, path.parent))
            except (ValueError, TypeError, OSError) as error:
                problems.append(f"{path}, line {number}: {error}")
                if len(problems) == _MOST_PROBLEMS:
                    break
    if problems:
        raise ConfigError(problems)
    if not chats:
        raise ConfigError([f"data={data}: the file holds no conversation"])
    return chats


def _chat(line: str, folder: Path) -> Prompt:
    try:
        chat = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not readable as JSON ({error})") from None
    messages = _field(chat, "messages", list)
    prompt = Prompt(tuple(Message(_field(m, "role", str), _parts(m.get("content"), folder)) for m in messages))
    if not any(message.role == "assistant" for message in prompt.messages):
        raise ValueError("no message has the role assistant, so there is nothing to learn; add the wanted reply")
    return prompt


def _field(mapping: Any, key: str, kind: type[T]) -> T:
    """An entry of a JSON object, of the type it has to have."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if not isinstance(value, kind):
        names: dict[type, str] = {str: "text", list: "a list"}
        name = names.get(kind, kind.__name__)
        raise ValueError(f"{str(mapping)[:80]} has no '{key}' that is {name}")
    return value


def _parts(content: Any, folder: Path) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, list):
        raise ValueError(f"a message's content is {content!r}; it must be text or a list of parts")
    parts: list[Part] = []
    for item in content:
        kind = _field(item, "type", str)
        if kind == "text":
            parts.append(TextPart(_field(item, "text", str)))
        elif kind == "image":
            parts.append(ImagePart(_frame(folder / _field(item, "image", str))))
        elif kind == "video":
            names = _field(item, "video", list)
            parts.append(VideoPart(tuple(_frame(folder / name) for name in names), float(item.get("fps", 2.0))))
        else:
            raise ValueError(f"a part has the type {kind!r}; known are text, image and video")
    return tuple(parts)


def _frame(path: Path) -> Frame:
    try:
        with Image.open(path) as picture:
            return Frame(np.asarray(picture.convert("RGB")))
    except FileNotFoundError:
        raise ValueError(f"there is no picture {path}; paths are relative to the JSONL file") from None
