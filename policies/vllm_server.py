"""The sampler `vllm-server`: one or more vLLM servers over HTTP, which may come and go.

Each question goes to the server that has the fewest to answer. A server that fails is left out, its questions are asked of
another one, and it is taken back once it answers again and has the current adapter. Questions carry token ids and patches
(`policies.vllm_prompts`), so a client needs no vLLM of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from grpo_agents.config import SamplerConfig
from grpo_agents.errors import SamplerError
from grpo_agents.policies.base_model import resolve_model
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.policies.vllm_http import Refused, ServerFault, VllmClient
from grpo_agents.policies.vllm_prompts import wire_features
from grpo_agents.policies.vllm_replies import Answer, Question, draw_reply
from grpo_agents.policies.vllm_weights import Adapter, AdapterStore
from grpo_agents.rl.episode import Sample

_AT_ONCE = 256
_AGAIN_S = 1.0
"""Seconds after which a server that failed is tried again."""
_LOOK_S = 0.1
"""Seconds between two looks at whether any server is back."""


@dataclass(eq=False)
class Server:
    """What is known of one server.

    Attributes:
        client: how it is reached.
        model: the name under which it has the current weights; None while it is left out.
        reason: why it is left out.
        waiting: questions it has to answer.
        retry_at: time of the monotonic clock from which it is worth asking again.
        joining: the attempt to take it back that is under way.
    """

    client: VllmClient
    model: str | None = None
    reason: str = "not asked yet"
    waiting: int = 0
    retry_at: float = 0.0
    joining: Future[None] | None = None
    lock: Lock = field(default_factory=Lock)


class VllmServerSampler:
    """Samples from vLLM servers.

    Args:
        policy: the model that learns; its LoRA adapter is what the servers are given.
        config: settings; `url` holds the servers' addresses.

    Raises:
        SamplerError: no address, or weights that cannot be handed to a server.
    """

    def __init__(self, policy: QwenVL, config: SamplerConfig):
        if not config.url:
            raise SamplerError("sampler=vllm-server needs addresses: set sampler.url=http://localhost:8000")
        if not policy.config.lora.rank or policy.vision_trained:
            raise SamplerError(
                "vLLM servers take the LoRA adapter of the language model, not all weights (policy.lora.rank=0) or a trained "
                "vision tower (policy.vision=trained). Use sampler=vllm, which hands over all weights in its own process"
            )
        self.policy = policy
        self.config = config
        self.servers = [Server(VllmClient(url, config.timeout)) for url in config.url]
        self._adapters = AdapterStore(policy, config.adapters)
        self._target: Adapter | None = None
        self._version = policy.version
        self._asking = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="vllm-ask")
        self._joining = ThreadPoolExecutor(len(self.servers), thread_name_prefix="vllm-join")
        self._busy_since = 0.0
        self._counts = self._zero()
        # A run that ends in an error leaves no adapters behind either.
        atexit.register(self.close)

    async def sample(self, request: SampleRequest) -> Sample:
        """Draw one reply.

        Raises:
            SamplerError: no server answered for `sampler.patience` seconds, or one refused the question itself.
        """
        sample = await draw_reply(request, self._ask, end_of_turn=self.policy.end_of_turn, version=self._version)
        self._counts["samples"] += 1
        self._counts["tokens"] += len(sample.ids)
        return sample

    def sync(self, version: int) -> None:
        """Give the policy's adapter to all servers that answer; the others get it when they are taken back.

        Raises:
            SamplerError: no server answered for `sampler.patience` seconds, or one cannot take adapters.
        """
        old, self._target = self._target, self._adapters.save()
        self._version = self.policy.version = version
        began = time.monotonic()
        for server in self.servers:
            server.model = None
        while True:
            list(self._joining.map(self._join, self.servers))
            if any(server.model for server in self.servers):
                break
            self._check_patience(began)
            time.sleep(_AGAIN_S)
        if old is not None:
            shutil.rmtree(old.path, ignore_errors=True)

    def statistics(self) -> dict[str, Any]:
        """Counters since the last call.

        samples, tokens, passes (questions answered), retries (questions asked again after a failure), rejoins (servers taken
        back), and seconds, equal to model_seconds: the time in which at least one question waited for its answer.
        """
        counts, self._counts = self._counts, self._zero()
        return counts

    def close(self) -> None:
        """Take the adapter from the servers, and end all connections."""
        atexit.unregister(self.close)
        for server in self.servers:
            if server.model and self._target:
                try:
                    server.client.unload(self._target.name)
                except (ServerFault, Refused):
                    continue
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._joining.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _zero() -> dict[str, Any]:
        names = ("samples", "tokens", "passes", "retries", "rejoins")
        return dict.fromkeys(names, 0) | {"seconds": 0.0, "model_seconds": 0.0}

    async def _ask(self, question: Question) -> Answer:
        encoded = question.encoded
        body = {
            "token_ids": [*encoded.layout.ids.tolist(), *question.tokens],
            "sampling_params": question.parameters(self.policy.end_of_turn),
            "features": wire_features(encoded, self.policy.encode),
        }
        began = time.monotonic()
        if not any(server.waiting for server in self.servers):
            self._busy_since = began
        while True:
            server = self._choose()
            if server is None:
                self._check_patience(began)
                await asyncio.sleep(_LOOK_S)
                continue
            server.waiting += 1
            try:
                loop = asyncio.get_running_loop()
                reply = await loop.run_in_executor(self._asking, server.client.generate, server.model, body)
                self._counts["passes"] += 1
                return _answer(reply, question, server.client.url)
            except ServerFault as fault:
                self._leave_out(server, str(fault))
                self._counts["retries"] += 1
                self._check_patience(began)
            except Refused as refusal:
                raise SamplerError(f"{server.client.url} refused a question: {refusal}") from refusal
            finally:
                server.waiting -= 1
                if not any(other.waiting for other in self.servers):
                    spent = time.monotonic() - self._busy_since
                    self._counts["seconds"] += spent
                    self._counts["model_seconds"] += spent

    def _choose(self) -> Server | None:
        """The server with the fewest questions; those left out are tried again on the side."""
        now = time.monotonic()
        for server in self.servers:
            if server.joining is not None and server.joining.done():
                done, server.joining = server.joining, None
                done.result()
                self._counts["rejoins"] += server.model is not None
            if server.model is None and server.joining is None and now >= server.retry_at:
                server.joining = self._joining.submit(self._join, server)
        ready = [server for server in self.servers if server.model is not None]
        return min(ready, key=lambda server: server.waiting, default=None)

    def _join(self, server: Server) -> None:
        """Bring a server to the current adapter. Where it does not answer it stays left out."""
        with server.lock:
            target = self._target
            try:
                models = server.client.models()
                base = self._base(models, server.client.url)
                names = {model["id"] for model in models}
                if target is not None and target.name not in names:
                    server.client.load(target.name, str(target.path))
                for name in sorted(names):
                    if self._adapters.owns(name) and (target is None or name != target.name):
                        server.client.unload(name)
                server.model = base if target is None else target.name
            except ServerFault as fault:
                self._leave_out(server, str(fault))
            except Refused as refusal:
                raise SamplerError(
                    f"{server.client.url} does not take adapters: {refusal}. Start it with python -m grpo_agents.serve, "
                    "or vllm serve with --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; it must "
                    f"read {self._adapters.root} under the same path (sampler.adapters)"
                ) from refusal

    def _base(self, models: list[dict[str, Any]], url: str) -> str:
        """The served name of the base model.

        Raises:
            SamplerError: it is not the policy's.
        """
        source = self.policy.source
        bases = [model for model in models if model.get("parent") is None]
        for model in bases:
            root = str(model.get("root") or model["id"])
            if resolve_model(root) == source or Path(root).name == Path(source).name:
                return str(model["id"])
        served = ", ".join(str(model.get("root") or model["id"]) for model in bases) or "nothing"
        raise SamplerError(
            f"{url} serves {served}, and the policy is {source}. Start the server with that model, or set policy.model"
        )

    def _leave_out(self, server: Server, reason: str) -> None:
        server.model, server.reason = None, reason
        server.retry_at = time.monotonic() + _AGAIN_S

    def _check_patience(self, began: float) -> None:
        if time.monotonic() - began < self.config.patience:
            return
        states = "; ".join(f"{server.client.url}: {server.reason}" for server in self.servers)
        raise SamplerError(
            f"no vLLM server gave an answer for {self.config.patience:g} seconds (sampler.patience). {states}. Everything up "
            "to the last update is saved: start a server (python -m grpo_agents.serve model=...), then go on with "
            "python -m grpo_agents.train resume=<the run's folder>"
        )


def _answer(reply: dict[str, Any], question: Question, url: str) -> Answer:
    choice = reply["choices"][0]
    ids = [int(token) for token in choice["token_ids"]]
    content = choice["logprobs"]["content"]
    logprobs = [float(entry["logprob"]) for entry in content]
    if question.options is None:
        return Answer(ids, logprobs)
    found = {int(entry["token_id"]): float(entry["logprob"]) for entry in content[0]["top_logprobs"]}
    missing = [token for token in question.options if token not in found]
    if missing:
        raise SamplerError(
            f"{url} gives log-probabilities of tokens that were not allowed. Start it with python -m grpo_agents.serve, or "
            "vllm serve with --logprobs-mode processed_logprobs --max-logprobs -1"
        )
    return Answer(ids, logprobs, np.array([found[token] for token in question.options], dtype=np.float64))
