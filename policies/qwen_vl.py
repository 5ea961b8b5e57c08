"""A Qwen vision-language model with LoRA adapters as a policy.

Any Qwen-VL of transformers serves (Qwen2.5-VL, Qwen3-VL; by name, by folder, or the tiny one in assets/). The reference
for the KL is the same model with its adapter off.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_agents.config import PolicyConfig
from grpo_agents.errors import PolicyLoadError
from grpo_agents.policies.base_model import load_base, read_adapter, record_base, resolve_model
from grpo_agents.policies.encode import Encoder
from grpo_agents.policies.sequences import TokenBatch
from grpo_agents.policies.vision import vision_features
from grpo_agents.rl.episode import Encoded

PrefixCache = list[tuple[Tensor, Tensor]]
_AT_ONCE = 256
"""Prompts whose pictures go through the vision tower together."""


class QwenVL(nn.Module):
    """A loaded policy. Use `QwenVL.load`.

    Attributes:
        model: the transformers model, or the peft model around it when there is an adapter.
        core: the transformers model itself, its layers carrying the adapter.
        encode: turns prompts into token ids (`Encoder`).
        source: the folder or hub name the base model came from.
        version: number of updates behind the weights.
    """

    def __init__(self, core: Any, processor: Any, config: PolicyConfig, source: str):
        super().__init__()
        self.core = core
        self.model = core
        self.config = config
        self.source = source
        self.processor = processor
        self.encode = Encoder(processor, core.model.get_rope_index)
        self.version = 0
        self._reference: nn.ModuleDict | None = None

    @classmethod
    def load(cls, config: PolicyConfig, *, seed: int = 0, adapter: Path | None = None) -> QwenVL:
        """Load base model and processor and put a new adapter, or a saved one, on it.

        Args:
            config: what to load and how to train it.
            seed: of the new adapter's random half (the other half is zero, so that a new adapter changes nothing).
            adapter: folder written by `save`; its base must be the configured one.

        Raises:
            PolicyLoadError: no such model, no processor in the folder, an unsupported family, an adapter of another base.
        """
        source = resolve_model(config.model)
        core, processor = load_base(source, config)
        policy = cls(core, processor, config, source)
        policy.requires_grad_(False)
        policy.eval()
        if config.lora.rank:
            policy._add_adapter(seed, adapter)
        else:
            policy._train_all_weights(adapter)
        policy.to(config.device or best_device())
        return policy

    def _add_adapter(self, seed: int, adapter: Path | None) -> None:
        from peft import LoraConfig, get_peft_model

        lora = self.config.lora
        if adapter is not None:
            config, _ = read_adapter(adapter, self.source)
            config.inference_mode, config.base_model_name_or_path = False, self.source
        else:
            config = LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha or 2.0 * lora.rank,
                lora_dropout=lora.dropout,
                target_modules=self._target_pattern(lora.target_modules),
                task_type="CAUSAL_LM",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = get_peft_model(self.core, config)
        if adapter is not None:
            self.load_adapter(adapter)

    def _target_pattern(self, names: list[str] | None) -> str:
        """Regular expression for the adapted layers: in the language model's blocks, and the tower's if it is trained."""
        towers = ["language_model.layers"] + (["visual.blocks"] if self.config.vision == "trained" else [])
        linear = {
            name.rsplit(".", 1)[-1]
            for name, module in self.core.named_modules()
            if isinstance(module, nn.Linear) and any(f"{tower}." in name for tower in towers)
        }
        unknown = sorted(set(names or ()) - linear)
        if unknown:
            raise PolicyLoadError(
                f"policy.lora.target_modules names {', '.join(unknown)}, which this model does not have; its linear layers "
                f"are {', '.join(sorted(linear))}"
            )
        where, what = "|".join(map(re.escape, towers)), "|".join(sorted(names or linear))
        return rf".*({where})\..*\.({what})"

    def _train_all_weights(self, adapter: Path | None) -> None:
        """Full fine-tuning. The reference for the KL is then a frozen copy, since there is no adapter to switch off."""
        trained = {"language": self.language, "head": self.core.lm_head}
        if self.vision_trained:
            trained["tower"] = self.tower
        self._reference = nn.ModuleDict(copy.deepcopy(trained))
        self._reference.requires_grad_(False)
        if adapter is not None:
            self.load_adapter(adapter)
        self.language.requires_grad_(True)
        self.core.lm_head.requires_grad_(True)
        if self.vision_trained:
            self.tower.requires_grad_(True)

    @property
    def language(self) -> Any:
        return self.core.model.language_model

    @property
    def tower(self) -> Any:
        return self.core.model.visual

    @property
    def device(self) -> torch.device:
        return next(self.core.parameters()).device

    @property
    def vision_trained(self) -> bool:
        """Whether vision features change with the weights, so that features kept from play are stale after an update."""
        return self.config.vision == "trained"

    @property
    def pad_id(self) -> int:
        return int(self.processor.tokenizer.pad_token_id)

    @property
    def end_of_turn(self) -> int:
        return int(self.processor.tokenizer.eos_token_id)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.core.parameters() if p.requires_grad]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context the model computes as it did before any training."""
        if self._reference is None:
            with self.model.disable_adapter():
                yield
            return
        trained = self.language, self.tower, self.core.lm_head
        before = dict(self._reference.items())
        self._use(before["language"], before.get("tower", self.tower), before["head"])
        try:
            yield
        finally:
            self._use(*trained)

    def _use(self, language: nn.Module, tower: nn.Module, head: nn.Module) -> None:
        self.core.model.language_model, self.core.model.visual, self.core.lm_head = language, tower, head

    def vision(self, prompts: Sequence[Encoded]) -> list[Tensor]:
        """Vision features of each prompt: (1 + D, visual tokens, hidden). Equal pictures' grids share one forward pass."""
        pieces: list[list[Tensor]] = [[] for _ in prompts]
        jobs: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for row, prompt in enumerate(prompts):
            for column, frames in enumerate(prompt.visuals):
                pieces[row].append(torch.empty(0))
                jobs.setdefault((len(frames), *frames[0].pixels.shape), []).append((row, column))
        for (count, height, width, _), places in jobs.items():
            patches = self.encode.patches([prompts[row].visuals[column] for row, column in places])
            grid = (-(-count // self.encode.temporal), height // self.encode.patch, width // self.encode.patch)
            features = vision_features(self.tower, patches.to(self.device), grid)
            for (row, column), feature in zip(places, features, strict=True):
                pieces[row][column] = feature
        return [torch.cat(parts, dim=1) for parts in pieces]

    @torch.no_grad()
    def observations(self, prompts: Sequence[Encoded], features: Sequence[Tensor | None]) -> NDArray[np.float32]:
        """What the vision tower sees in each prompt, summed up in a row of numbers.

        Args:
            prompts: N prompts.
            features: their vision features as `vision` gives them; None where they have to be computed.

        Returns:
            (N, F), F = 2 * (1 + D) * hidden: the features' mean over all pictures, and over the newest picture or temporal
            patch alone. Rows of prompts without pictures are 0, and F is 0 where no prompt has one.
        """
        rows: list[NDArray[np.float32] | None] = []
        for begin in range(0, len(prompts), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            known = list(features[part])
            missing = [i for i, feature in enumerate(known) if feature is None and prompts[begin + i].visuals]
            for i, feature in zip(missing, self.vision([prompts[begin + i] for i in missing]), strict=True):
                known[i] = feature
            rows += [_summary(prompt, feature) for prompt, feature in zip(prompts[part], known, strict=True)]
        width = next((len(row) for row in rows if row is not None), 0)
        blank = np.zeros(width, dtype=np.float32)
        return np.stack([blank if row is None else row for row in rows])

    def prefix_cache(self, batch: TokenBatch) -> PrefixCache | None:
        """Keys and values of the batch's shared prefix, (1, heads, P, d) for each layer; None when there is no prefix."""
        if not len(batch.prefix_ids):
            return None
        cache = DynamicCache(config=self.core.config.text_config)
        self.language(
            inputs_embeds=self.language.embed_tokens(batch.prefix_ids[None]),
            position_ids=batch.prefix_positions[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        return [(layer.keys, layer.values) for layer in cache.layers]

    def hidden(
        self, batch: TokenBatch, prefix: PrefixCache | None = None, *, keep_cache: bool = False
    ) -> tuple[Tensor, DynamicCache | None]:
        """Last hidden states (B, S, hidden) of the tokens after the prefix, and the cache of all tokens if asked for.

        Args:
            batch: the sequences.
            prefix: from `prefix_cache` with the same weights; computed here (with its gradient) when None.
            keep_cache: also return keys and values, to go on generating from.
        """
        embeds = self.language.embed_tokens(batch.ids)
        extra: dict[str, Any] = {}
        pictured = [source for source in batch.sources if source.visuals]
        if pictured:
            features = batch.features
            if features is None:
                features = torch.cat(self.vision(pictured), dim=1)
            features = features.to(embeds.dtype)
            embeds = embeds.masked_scatter(batch.visual[..., None], features[0])
            if len(features) > 1:
                extra = {"visual_pos_masks": batch.visual, "deepstack_visual_embeds": list(features[1:])}
        if prefix is None:
            prefix = self.prefix_cache(batch)
        cache = None
        if prefix is not None:
            rows = len(batch)
            expanded = [(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)) for k, v in prefix]
            cache = DynamicCache(ddp_cache_data=expanded, config=self.core.config.text_config)
        elif keep_cache:
            cache = DynamicCache(config=self.core.config.text_config)
        output = self.language(
            inputs_embeds=embeds,
            position_ids=batch.positions,
            past_key_values=cache,
            use_cache=cache is not None,
            **extra,
        )
        return output.last_hidden_state, cache

    def token_logits(self, batch: TokenBatch, prefix: PrefixCache | None = None) -> Tensor:
        """Logits that predict each target, (B, C, vocabulary), in float32."""
        if self.config.gradient_checkpointing and torch.is_grad_enabled():
            batch, prefix = batch.without_prefix(), None
            with self._recomputed():
                hidden, _ = self.hidden(batch)
        else:
            hidden, _ = self.hidden(batch, prefix)
        rows = torch.arange(len(batch), device=hidden.device)[:, None]
        return self.core.lm_head(hidden[rows, batch.index]).float()

    @contextmanager
    def _recomputed(self) -> Iterator[None]:
        """Within this context layers keep their inputs alone and are computed again in the backward pass.

        transformers recomputes only layers in training mode, and drops any cache that it gives them. So the mode is set here
        for the layers themselves (not for the dropout inside), and only for passes that have no cache.
        """
        layers = [module for module in self.core.modules() if isinstance(module, GradientCheckpointingLayer)]
        modes = [layer.training for layer in layers]
        self.core.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            for layer in layers:
                layer.training = True
            yield
        finally:
            self.core.gradient_checkpointing_disable()
            for layer, mode in zip(layers, modes, strict=True):
                layer.training = mode

    def forward(self, batch: TokenBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy of the distribution it was drawn from, both (B, C)."""
        return token_logprobs(self.token_logits(batch), batch, temperature)

    def save(self, folder: Path) -> None:
        """Write the adapter in peft's format, or the whole model where there is no adapter."""
        if self.config.lora.rank:
            self.model.save_pretrained(str(folder))
            record_base(folder, self.source)
        else:
            self.core.save_pretrained(str(folder))
            self.processor.save_pretrained(str(folder))

    def load_adapter(self, folder: Path) -> None:
        """Replace the trained weights by saved ones of the same form.

        Args:
            folder: written by `save`.

        Raises:
            PolicyLoadError: the folder lacks a file or holds a damaged one, its weights have other names or shapes, or
                they were trained on another base model.
        """
        if self.config.lora.rank:
            from peft import get_peft_model_state_dict, set_peft_model_state_dict

            _, weights = read_adapter(folder, self.source)
            own = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        else:
            saved, _ = load_base(str(folder), self.config.model_copy(update={"model": str(folder)}))
            own, weights = self.core.state_dict(), saved.state_dict()
        shapes, wanted = ({name: tuple(x.shape) for name, x in state.items()} for state in (weights, own))
        if shapes != wanted:
            name, shape = sorted(set(shapes.items()) ^ set(wanted.items()))[0]
            raise PolicyLoadError(
                f"the weights in {folder} do not fit the policy: {name} {shape} is in only one of the two. Use the "
                "policy.lora and policy.vision settings they were trained with"
            )
        if self.config.lora.rank:
            set_peft_model_state_dict(self.model, weights)
        else:
            self.core.load_state_dict(weights)


def _summary(prompt: Encoded, features: Tensor | None) -> NDArray[np.float32] | None:
    if features is None or not prompt.visuals:
        return None
    newest = prompt.layout.spans[-1]
    tokens = features.float().cpu().numpy()
    last = tokens[:, -newest.count // newest.grid[0] :]
    return np.concatenate([tokens.mean(axis=1).ravel(), last.mean(axis=1).ravel()])


def token_logprobs(logits: Tensor, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies under the distribution that was sampled from.

    Args:
        logits: (B, C, vocabulary).
        batch: its targets (B, C), and allowed (B, C, A) where replies were chosen from action words: then probabilities
            are renormalised over the allowed tokens.
        temperature: divides the logits.

    Returns:
        Two float32 tensors (B, C); padding is 0.
    """
    scaled = logits / temperature
    if batch.allowed is None:
        log_all = torch.log_softmax(scaled, dim=-1)
        chosen = batch.targets
    else:
        absent = batch.allowed < 0
        restricted = scaled.gather(-1, batch.allowed.clamp_min(0)).masked_fill(absent, -torch.inf)
        log_all = torch.log_softmax(restricted, dim=-1).masked_fill(absent, -1e4)
        chosen = (batch.allowed == batch.targets[..., None]).int().argmax(-1)
    logprobs = log_all.gather(-1, chosen[..., None])[..., 0]
    entropy = -(log_all.exp() * log_all).sum(-1)
    padding = ~batch.mask
    return logprobs.masked_fill(padding, 0.0), entropy.masked_fill(padding, 0.0)


def best_device() -> str:
    """cuda, mps or cpu: the first that is there."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
