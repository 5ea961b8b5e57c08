"""The local sampler: transformers, batched over all episodes that wait, with nothing computed twice.

The prompt's static prefix is computed once for each adapter version; the features of a frozen vision tower once for each
picture, and they stay with the sample for the learner.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from grpo_agents.policies.action_words import ActionWords, Node
from grpo_agents.policies.qwen_vl import PrefixCache, QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.policies.sequences import TokenBatch, TokenSequence, collate
from grpo_agents.rl.episode import Encoded, Sample

_KEPT_FEATURES = 4096


class LocalSampler:
    """Samples from the learner's own model in the learner's process.

    Requests are gathered for one turn of the event loop and answered together: an episode whose environment answers at
    once always finds its siblings in the same batch, and one that is slow holds back nobody.

    Args:
        policy: the model that learns; there is nothing to copy, `sync` drops what was computed with older weights.
        batch_size: most prompts in one forward pass.
    """

    def __init__(self, policy: QwenVL, batch_size: int = 256):
        self.policy = policy
        self.batch_size = batch_size
        self._waiting: list[tuple[SampleRequest, asyncio.Future[Sample]]] = []
        self._prefixes: dict[bytes, PrefixCache | None] = {}
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self._counts = {"samples": 0, "tokens": 0, "passes": 0, "seconds": 0.0, "model_seconds": 0.0}

    async def sample(self, request: SampleRequest) -> Sample:
        """Draw one reply, together with all others asked for in this turn of the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sample] = loop.create_future()
        if not self._waiting:
            # Episodes that can run do so before this callback: it was scheduled after they were.
            loop.call_soon(self._answer)
        self._waiting.append((request, future))
        return await future

    def sync(self, version: int) -> None:
        """Forget what was computed with older weights."""
        self.policy.version = version
        self._prefixes.clear()
        if self.policy.vision_trained:
            self._features.clear()

    def statistics(self) -> dict[str, Any]:
        """Samples, tokens, forward passes and seconds since the last call."""
        counts = dict(self._counts)
        self._counts = {key: 0 if isinstance(value, int) else 0.0 for key, value in counts.items()}
        return counts

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            samples = self.sample_many([request for request, _ in waiting])
        except Exception as error:
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), sample in zip(waiting, samples, strict=True):
            if not future.done():
                future.set_result(sample)

    @torch.no_grad()
    def sample_many(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Draw one reply for each request, in one forward pass for all that share a layout, temperature and words."""
        begin = time.perf_counter()
        groups: dict[tuple[int, int, float], list[int]] = {}
        for i, request in enumerate(requests):
            key = (id(request.encoded.layout), id(request.actions), request.temperature)
            groups.setdefault(key, []).append(i)
        samples: list[Sample | None] = [None] * len(requests)
        for members in groups.values():
            for start in range(0, len(members), self.batch_size):
                chunk = members[start : start + self.batch_size]
                for i, sample in zip(chunk, self._draw([requests[i] for i in chunk]), strict=True):
                    samples[i] = sample
        self._counts["samples"] += len(requests)
        self._counts["seconds"] += time.perf_counter() - begin
        return [sample for sample in samples if sample is not None]

    def _draw(self, requests: list[SampleRequest]) -> list[Sample]:
        features = self._vision([request.encoded for request in requests])
        unknown = np.array([self.policy.pad_id], dtype=np.int64)  # stands for the reply's first token
        sequences = [
            TokenSequence(request.encoded, unknown, [len(request.encoded.layout.ids)], None, feature)
            for request, feature in zip(requests, features, strict=True)
        ]
        batch = collate_prompts(sequences, self.policy)
        replies = _Replies(requests, self.policy.end_of_turn)
        single = replies.one_decision
        begin = time.perf_counter()
        hidden, cache = self.policy.hidden(batch, self._prefix(batch), keep_cache=not single)
        logits = self.policy.core.lm_head(hidden[:, -1]).float()
        self._counts["model_seconds"] += time.perf_counter() - begin
        self._counts["passes"] += 1
        replies.choose(logits)
        position = requests[0].encoded.layout.next_position
        while not replies.done:
            logits = self._step(replies.last_tokens(self.policy.pad_id), position, cache)
            position += 1
            replies.choose(logits)
        samples = replies.samples(self.policy.version, features if not self.policy.vision_trained else None)
        self._counts["tokens"] += sum(len(sample.ids) for sample in samples)
        return samples

    def _step(self, tokens: Tensor, position: int, cache: DynamicCache | None) -> Tensor:
        language = self.policy.language
        output = language(
            inputs_embeds=language.embed_tokens(tokens[:, None].to(self.policy.device)),
            position_ids=torch.full((3, len(tokens), 1), position, device=self.policy.device),
            past_key_values=cache,
            use_cache=True,
        )
        self._counts["passes"] += 1
        return self.policy.core.lm_head(output.last_hidden_state[:, -1]).float()

    def _prefix(self, batch: TokenBatch) -> PrefixCache | None:
        key = batch.prefix_ids.cpu().numpy().tobytes()
        if key not in self._prefixes:
            self._prefixes[key] = self.policy.prefix_cache(batch)
        return self._prefixes[key]

    def _vision(self, prompts: list[Encoded]) -> list[Tensor | None]:
        if not prompts[0].visuals:
            return [None] * len(prompts)
        keys = [prompt.observation_hash for prompt in prompts]
        fresh = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self._features}
        if fresh:
            begin = time.perf_counter()
            for key, feature in zip(fresh, self.policy.vision(list(fresh.values())), strict=True):
                self._features[key] = feature
            self._counts["model_seconds"] += time.perf_counter() - begin
        found: list[Tensor | None] = [self._features[key] for key in keys]
        while len(self._features) > _KEPT_FEATURES:
            self._features.popitem(last=False)
        return found


def collate_prompts(sequences: list[TokenSequence], policy: QwenVL) -> TokenBatch:
    """A batch of prompts of one layout, without padding: made once for the layout, and shared by all rows."""
    rows = len(sequences)
    one = collate(sequences[:1], policy.pad_id, policy.device)
    features = [sequence.features for sequence in sequences if sequence.features is not None]
    return TokenBatch(
        prefix_ids=one.prefix_ids,
        prefix_positions=one.prefix_positions,
        ids=one.ids.expand(rows, -1),
        positions=one.positions.expand(-1, rows, -1),
        visual=one.visual.expand(rows, -1),
        sources=tuple(sequence.encoded for sequence in sequences),
        features=torch.cat(features, dim=1) if features else None,
        index=one.index.expand(rows, -1),
        targets=one.targets.expand(rows, -1),
        mask=one.mask.expand(rows, -1),
        allowed=None,
    )


class _Replies:
    """Replies under construction for requests of one layout, one set of action words and one temperature."""

    def __init__(self, requests: list[SampleRequest], end_of_turn: int):
        self.requests = requests
        self.end_of_turn = end_of_turn
        self.temperature = requests[0].temperature
        self.actions: ActionWords | None = requests[0].actions
        rows = len(requests)
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.logprobs: list[list[float]] = [[] for _ in range(rows)]
        self.allowed: list[list[tuple[int, ...]]] = [[] for _ in range(rows)]
        self.probabilities: list[np.ndarray | None] = [None] * rows
        self.finish: list[str | None] = [None] * rows
        self.nodes: list[Node] = [self.actions.root] * rows if self.actions else []

    @property
    def one_decision(self) -> bool:
        """Whether the first token settles every reply."""
        return self.actions is not None and all(child.rest for child in self.actions.root.children.values())

    @property
    def done(self) -> bool:
        return all(self.finish)

    def last_tokens(self, pad_id: int) -> Tensor:
        return torch.tensor([ids[-1] if ids else pad_id for ids in self.ids])

    def choose(self, logits: Tensor) -> None:
        """Draw the next token of each unfinished reply from logits (B, vocabulary)."""
        logits = (logits / self.temperature).cpu()
        if self.actions is None:
            self._choose_free(torch.log_softmax(logits.double(), dim=-1).numpy())
        else:
            self._choose_word(logits)

    def _choose_free(self, logprobs: np.ndarray) -> None:
        for row, request in enumerate(self.requests):
            if self.finish[row]:
                continue
            token = draw_index(logprobs[row], request.rng)
            self.ids[row].append(token)
            self.logprobs[row].append(float(logprobs[row, token]))
            if token == self.end_of_turn:
                self.finish[row] = "stop"
            elif len(self.ids[row]) >= request.max_new_tokens:
                self.finish[row] = "length"

    def _choose_word(self, logits: Tensor) -> None:
        by_node: dict[int, list[int]] = {}
        for row, node in enumerate(self.nodes):
            if not self.finish[row]:
                by_node.setdefault(id(node), []).append(row)
        for rows in by_node.values():
            node = self.nodes[rows[0]]
            options = node.options
            restricted = logits[rows][:, list(options)].double()
            logprobs = torch.log_softmax(restricted, dim=-1).numpy()
            for row, row_logprobs in zip(rows, logprobs, strict=True):
                pick = 0 if node.forced else draw_index(row_logprobs, self.requests[row].rng)
                self.ids[row].append(options[pick])
                self.logprobs[row].append(float(row_logprobs[pick]))
                self.allowed[row].append(options)
                if self.probabilities[row] is None and not node.forced:
                    self.probabilities[row] = np.exp(row_logprobs)
                self._advance(row, node.children[options[pick]])

    def _advance(self, row: int, node: Node) -> None:
        """Go on to a node; where only one word is left, its other tokens are certain and are not computed."""
        self.nodes[row] = node
        if node.rest is None:
            return
        tokens, _ = node.rest
        self.ids[row] += tokens
        self.logprobs[row] += [0.0] * len(tokens)
        self.allowed[row] += [(token,) for token in tokens]
        self.finish[row] = "action"

    def samples(self, version: int, features: list[Tensor | None] | None) -> list[Sample]:
        firsts: tuple[int, ...] = ()
        order: dict[int, int] = {}
        if self.actions is not None:
            firsts = self.actions.first_tokens()
            order = {token: column for column, token in enumerate(sorted(set(firsts)))}
        out = []
        for row, request in enumerate(self.requests):
            probabilities = self.probabilities[row]
            out.append(
                Sample(
                    ids=np.array(self.ids[row], dtype=np.int64),
                    logprobs=np.array(self.logprobs[row], dtype=np.float32),
                    allowed=tuple(self.allowed[row]) if self.actions else None,
                    choice=self._choice(row),
                    choice_probs=None
                    if probabilities is None
                    else np.array([probabilities[order[token]] for token in firsts], dtype=np.float32),
                    policy_version=version,
                    temperature=self.temperature,
                    greedy=request.rng is None,
                    finish=self.finish[row] or "length",
                    features=features[row] if features else None,
                )
            )
        return out

    def _choice(self, row: int) -> int | None:
        rest = self.nodes[row].rest if self.actions else None
        return None if rest is None else rest[1]


def draw_index(logprobs: np.ndarray, rng: np.random.Generator | None) -> int:
    """Index drawn by inverting the cumulative distribution at one uniform number; the likeliest without a generator."""
    if rng is None:
        return int(np.argmax(logprobs))
    cumulative = np.cumsum(np.exp(logprobs))
    return min(int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")), len(logprobs) - 1)
