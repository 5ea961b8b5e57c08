"""`python -m grpo_agents.sft`: any chats with pictures, LoRA or all weights, and lines that are wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doors import ROOT, TINY, command, train_here
from PIL import Image

from grpo_agents.errors import ConfigError
from grpo_agents.run.chats import read_chats
from grpo_agents.run.command import run_command

QUICK = ("policy.device=cpu", "steps=4", "batch=8", "warmup=0")


def chat(picture: str, reply: str) -> dict[str, Any]:
    question = [{"type": "image", "image": picture}, {"type": "text", "text": "Which side is white?"}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 chats about pictures that are white on the left or on the right."""
    folder = tmp_path_factory.mktemp("chats")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(40):
        side = int(rng.integers(2))
        pixels = rng.integers(0, 50, (32, 96, 3), dtype=np.uint8)
        pixels[:, 48 * side : 48 * side + 48] = 255
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append(json.dumps(chat(f"{number}.png", ("left", "right")[side])))
    (folder / "chats.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def sft_here(folder: Path, *words: str) -> int:
    """Fine-tune in this process, as the command would in `folder`; returns its exit status."""
    from grpo_agents.sft import main

    with chdir(folder):
        return run_command(main, list(words))


def test_an_adapter_learns_the_chats_and_is_loaded_by_peft(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("policy.device=cpu", "steps=30", "batch=20", "lr=1e-2", "warmup=0", "holdout=0.2")
    assert sft_here(folder, "data=chats.jsonl", "output=adapter", *words) == 0
    printed = capsys.readouterr().out.splitlines()
    first = float(printed[0].split("loss ")[1].split()[0])
    last = float(printed[-2].split("loss ")[1].split()[0])
    assert last < first
    assert re.fullmatch(r"loss \d\.\d{3}, held-out accuracy [01]\.\d{3}; saved to adapter", printed[-1])

    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(str(ROOT / "assets" / "tiny-qwen-vl"))
    model = PeftModel.from_pretrained(base, str(folder / "adapter"))
    assert any(torch.any(value) for name, value in model.state_dict().items() if "lora_B" in name)


def test_all_weights_become_a_model_that_a_run_starts_from(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    words = ("data=chats.jsonl#16", f"output={output}", "policy.lora.rank=0", "holdout=0", *QUICK)
    assert sft_here(folder, *words) == 0
    assert "nothing held out" in capsys.readouterr().out
    assert train_here(tmp_path, *TINY, f"policy={output}", "updates=1", "eval.every=0", "name=from-sft") == 0
    assert f"policy {output}: " in capsys.readouterr().out


def test_only_the_first_chats_are_read_where_a_number_is_given(folder: Path) -> None:
    data = folder / "chats.jsonl"
    everything = read_chats(str(data))
    assert len(everything) == 40
    assert len(read_chats(f"{data}#3")) == 3
    assert len(read_chats(f"{data}#99")) == 40
    for number in ("0", "-1", "x"):
        with pytest.raises(ConfigError, match=f"after # stands the number of conversations to read, not '{number}'"):
            read_chats(f"{data}#{number}")


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing picture": (lambda _: chat("gone.png", "left"), "there is no picture .*gone.png"),
    "no assistant": (lambda good: {"messages": good["messages"][:1]}, "no message has the role assistant"),
    "no messages": (lambda _: {"conversation": []}, "has no 'messages' that is a list"),
    "a list": (lambda _: [1, 2], "has no 'messages' that is a list"),
    "no role": (lambda _: {"messages": [{"content": "x"}]}, "has no 'role' that is text"),
    "content": (lambda _: {"messages": [{"role": "user", "content": 3}]}, "content is 3; it must be text or a list"),
    "unknown part": (
        lambda _: {"messages": [{"role": "user", "content": [{"type": "sound"}]}]},
        "a part has the type 'sound'; known are text, image and video",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_line_is_named_with_its_number_in_the_file(folder: Path, mistake: str) -> None:
    change, message = MISTAKES[mistake]
    good = chat("0.png", "left")
    path = folder / "wrong.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(change(good))}\n{json.dumps(good)}\n")
    with pytest.raises(ConfigError, match=rf"wrong\.jsonl, line 3: .*{message}") as caught:
        read_chats(str(path))
    assert len(caught.value.problems) == 1


def test_all_wrong_lines_are_reported_at_once_before_torch_is_imported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('imported too early')\n")
    (folder / "broken.jsonl").write_text('{"messages": [\nhello\n{}\n')
    done = command("sft", "data=broken.jsonl", "output=x", folder=folder, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 3 settings are wrong:\n  - broken.jsonl, line 1: not readable as JSON (")
    assert "  - broken.jsonl, line 2: not readable as JSON (" in done.stderr
    assert not (folder / "x").exists()


def test_an_output_that_cannot_be_written_is_found_before_the_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("")
    assert sft_here(folder, "data=chats.jsonl", "output=file/adapter", *QUICK) == 2
    assert "output=file/adapter: the folder cannot be made (Not a directory)" in capsys.readouterr().err
    assert sft_here(folder, "data=none.jsonl", "output=y", *QUICK) == 2
    assert "data=none.jsonl: there is no file none.jsonl" in capsys.readouterr().err
