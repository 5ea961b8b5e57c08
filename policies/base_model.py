"""Base models and adapter folders: finding them, loading them, and telling whether an adapter belongs to a base.

An adapter is of use only on the weights it was trained on. Names do not settle that: a folder moves to another machine, and
one of the same name may hold other weights. So the adapter's folder also keeps a fingerprint of the base model's weight files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, PretrainedConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

import grpo_agents
from grpo_agents.config import PolicyConfig
from grpo_agents.errors import PolicyLoadError

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
BASE_RECORD = "base_model.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_READ = 4096
_READS = 4096


def resolve_model(name: str) -> str:
    """The folder of the tiny model for "tiny", the absolute path of a local folder, else the hub name unchanged."""
    if name == "tiny":
        places = [Path(root) / "assets" / "tiny-qwen-vl" for root in grpo_agents.__path__]
        return str(next((place.resolve() for place in places if place.is_dir()), places[0]))
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def load_base(source: str, config: PolicyConfig) -> tuple[Any, Any]:
    """Load a base model and its processor.

    Args:
        source: folder or hub name, from `resolve_model`.
        config: dtype and attention implementation; its `model` is what messages name.

    Raises:
        PolicyLoadError: no such model, a part of it is missing or damaged, or an unsupported family.
    """
    named = f"policy.model={config.model}"
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise PolicyLoadError(
                f"{named} is no model folder: {source} has no config.json. Name the folder that save_pretrained wrote"
            )
        if not any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
            raise PolicyLoadError(
                f"{named} has no processor (processor_config.json or preprocessor_config.json). Save it beside the "
                "weights: AutoProcessor.from_pretrained(<base model>).save_pretrained(<folder>)"
            )
    elif source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise PolicyLoadError(
            f"{named}: there is no such folder, and a hub name has the form owner/name. "
            "Use 'tiny', a folder, or a name such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    try:
        family = PretrainedConfig.get_config_dict(source)[0].get("model_type")
        if family not in FAMILIES:  # before the weights, which may take hours to download
            raise PolicyLoadError(
                f"{named} is a {family}; the supported families are {', '.join(FAMILIES)}. Use a Qwen2.5-VL or Qwen3-VL"
            )
        with _quiet_loading() if folder.is_dir() else nullcontext():
            model = AutoModelForImageTextToText.from_pretrained(
                source, dtype=config.dtype, attn_implementation=config.attn_implementation
            )
        return model, AutoProcessor.from_pretrained(source)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise PolicyLoadError(
            f"{named} cannot be loaded: {error}\nIf the name is right, its files are incomplete or damaged: copy or "
            "download them again"
        ) from error


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' progress bar: it ends up in the run's own display, and a local folder is read at once."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def fingerprint(source: str) -> str | None:
    """Hash of a model's weight files: 4 KiB at evenly spaced places of each, files below 16 MiB whole.

    Args:
        source: folder or hub name, from `resolve_model`.

    Returns:
        32 hex digits; None where the files are not on this machine.
    """
    folder = Path(source)
    if not folder.is_dir():
        try:
            config = cached_file(source, "config.json", local_files_only=True)
        except (OSError, ValueError):
            return None
        folder = Path(str(config)).parent
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(_READ, size // _READS)):
                file.seek(place)
                digest.update(file.read(_READ))
    return digest.hexdigest() if files else None


def record_base(adapter: Path, source: str) -> None:
    """Write beside an adapter which base model it was trained on."""
    record = {"model": source, "fingerprint": fingerprint(source)}
    (adapter / BASE_RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_adapter(adapter: Path, source: str) -> tuple[Any, dict[str, Tensor]]:
    """The configuration (peft's) and the weights of a saved adapter.

    Args:
        adapter: folder in peft's format.
        source: the base model it is to be put on, from `resolve_model`.

    Raises:
        PolicyLoadError: the folder is not there, lacks a file or holds a damaged one; or the adapter was trained on other
            weights than the base model's.
    """
    from peft import PeftConfig

    for name in ("adapter_config.json", ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise PolicyLoadError(
                f"{adapter} holds no peft adapter: it has no {name}. Name a folder such as runs/NAME/best, or save it again"
            )
    try:
        config = PeftConfig.from_pretrained(str(adapter))
        weights = load_file(adapter / ADAPTER_WEIGHTS)
        record = adapter / BASE_RECORD
        recorded = json.loads(record.read_text(encoding="utf-8"))["fingerprint"] if record.is_file() else None
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise PolicyLoadError(
            f"the adapter in {adapter} is damaged: {error!r}. Use an earlier checkpoint, or copy the folder again"
        ) from error
    base = config.base_model_name_or_path or "an unnamed model"
    if not _same_base(base, recorded, source):
        raise PolicyLoadError(
            f"the adapter in {adapter} was trained on {base}, whose weights are not those of {source}. Set policy.model "
            "to the model it was trained on, or start a new run"
        )
    return config, weights


def _same_base(base: str, recorded: str | None, source: str) -> bool:
    """Whether an adapter's base is the model at `source`: by its weights, or by its name where nothing else is known."""
    own = fingerprint(source)
    if recorded is not None and own is not None:
        return recorded == own
    other = resolve_model(base)
    return other == source or (own is not None and fingerprint(other) == own)
