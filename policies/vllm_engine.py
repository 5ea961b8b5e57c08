"""The sampler `vllm`: vLLM's engine in the learner's process."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any

import numpy as np

from grpo_agents.config import SamplerConfig
from grpo_agents.errors import SamplerError
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.policies.vllm_prompts import engine_input
from grpo_agents.policies.vllm_replies import Answer, Question, draw_reply
from grpo_agents.policies.vllm_setup import prepare, require_vllm
from grpo_agents.policies.vllm_weights import LORA_RANKS, Adapter, AdapterStore, merged_weights
from grpo_agents.rl.episode import Sample

_DEFAULT_LENGTH = 4096
_DEFAULT_MEMORY = 0.3


class VllmSampler:
    """Samples from a vLLM engine in this process.

    Requests join the engine's batch whenever their episodes ask, also while others are being answered. The engine makes
    one step in each turn of the event loop, so that an episode whose answer is there plays on at once.

    While only language layers are adapted the engine is given the LoRA adapter alone. Full fine-tuning, or an adapter in
    the vision tower, hands over all weights and clears all caches.

    Args:
        policy: the model that learns.
        config: settings.

    Raises:
        MissingDependencyError: vLLM is not installed, or in another version.
        SamplerError: the engine does not start.
    """

    def __init__(self, policy: QwenVL, config: SamplerConfig):
        require_vllm()
        prepare(config.vllm.cache_gb)
        self.policy = policy
        self._adapters = AdapterStore(policy)
        self._by_adapter = bool(policy.config.lora.rank) and not policy.vision_trained
        self._engine = _start_engine(policy, config, lora=self._by_adapter)
        self._adapter: Adapter | None = None
        self._version = policy.version
        self._asked = 0
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self._counts = {"samples": 0, "tokens": 0, "passes": 0, "seconds": 0.0, "model_seconds": 0.0}

    async def sample(self, request: SampleRequest) -> Sample:
        """Draw one reply."""
        sample = await draw_reply(request, self._ask, end_of_turn=self.policy.end_of_turn, version=self._version)
        self._counts["samples"] += 1
        self._counts["tokens"] += len(sample.ids)
        return sample

    def sync(self, version: int) -> None:
        """Take over the policy's weights, in a new adapter or all of them."""
        if self._by_adapter:
            self._swap(self._adapters.save())
        else:
            self._reload()
        self._version = self.policy.version = version

    def statistics(self) -> dict[str, Any]:
        """Samples, tokens, engine steps (`passes`) and seconds since the last call."""
        counts = dict(self._counts)
        self._counts = {key: 0 if isinstance(value, int) else 0.0 for key, value in counts.items()}
        return counts

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._engine.engine_core.shutdown()

    def _swap(self, new: Adapter | None) -> None:
        old, self._adapter = self._adapter, new
        if new is not None:
            self._engine.add_lora(self._lora(new))
        if old is not None:
            self._engine.remove_lora(old.number)
            shutil.rmtree(old.path, ignore_errors=True)

    def _lora(self, adapter: Adapter) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(adapter.name, adapter.number, str(adapter.path))

    def _reload(self) -> None:
        weights = merged_weights(self.policy)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine.reset_encoder_cache()
        self._engine.reset_mm_cache()
        self._engine.reset_prefix_cache()

    async def _ask(self, question: Question) -> Answer:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError

        begin = time.perf_counter()
        parameters: Any = question.parameters(self.policy.end_of_turn)
        prompt = engine_input(question.encoded, question.tokens, self.policy.encode)
        self._asked += 1
        try:
            name = self._engine.add_request(
                str(self._asked),
                prompt,
                SamplingParams(**parameters),
                lora_request=self._lora(self._adapter) if self._adapter else None,
            )
        except (ValueError, VLLMClientError) as error:
            raise SamplerError(
                f"the vLLM engine refuses a prompt of {len(prompt['prompt_token_ids'])} tokens: {error} "
                "(sampler.vllm.max_model_len is the longest prompt and reply together)"
            ) from error
        loop = asyncio.get_running_loop()
        if not self._futures:
            loop.call_soon(self._step)
        future = self._futures[str(self._asked)] = loop.create_future()
        self._counts["seconds"] += time.perf_counter() - begin
        try:
            output = await future
        except asyncio.CancelledError:
            self._engine.abort_request([name], internal=True)
            raise
        return _answer(output.outputs[0], question)

    def _step(self) -> None:
        begin = time.perf_counter()
        try:
            outputs = self._engine.step()
        except Exception as error:
            waiting, self._futures = self._futures, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(SamplerError(f"the vLLM engine failed: {error}"))
            return
        finally:
            spent = time.perf_counter() - begin
            self._counts["passes"] += 1
            self._counts["seconds"] += spent
            self._counts["model_seconds"] += spent
        for output in outputs:
            if not output.finished:
                continue
            answered: asyncio.Future[Any] | None = self._futures.pop(output.request_id, None)
            if answered is not None and not answered.done():
                answered.set_result(output)
        if self._futures:
            # After the episodes that were just answered: what they ask next joins the same step.
            asyncio.get_running_loop().call_soon(self._step)


def _answer(output: Any, question: Question) -> Answer:
    ids = list(output.token_ids)
    logprobs = [row[token].logprob for row, token in zip(output.logprobs, ids, strict=True)]
    if question.options is None:
        return Answer(ids, logprobs)
    first = output.logprobs[0]
    return Answer(ids, logprobs, np.array([first[token].logprob for token in question.options], dtype=np.float64))


def _check_cpu_kernels(policy: QwenVL) -> None:
    """Say now what the engine would find out only in the first request, and then in few words."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = policy.core.config.text_config
    size = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise SamplerError(
            f"{policy.source} has attention heads of size {size}, and vLLM's CPU kernels take {', '.join(map(str, known))}. "
            "Use sampler=local, a GPU, or another model"
        )


def _start_engine(policy: QwenVL, config: SamplerConfig, *, lora: bool) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = policy.device.type == "cpu"
    if on_cpu:
        _check_cpu_kernels(policy)
    vllm = config.vllm
    memory = vllm.memory or _DEFAULT_MEMORY
    limit = int(policy.core.config.text_config.max_position_embeddings)
    rank = policy.config.lora.rank
    extra: dict[str, Any] = {}
    if lora:
        room = next((known for known in LORA_RANKS if known >= rank), None)
        if room is None:
            raise SamplerError(f"policy.lora.rank={rank}: vLLM takes ranks up to {LORA_RANKS[-1]}")
        extra = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": room}
    if vllm.block_size or on_cpu:
        # vLLM's own choice there is so large that short prompts never find their prefix again.
        extra["block_size"] = vllm.block_size or 32
    arguments = EngineArgs(
        model=policy.source,
        dtype=str(policy.core.dtype).removeprefix("torch."),
        max_model_len=vllm.max_model_len or min(_DEFAULT_LENGTH, limit),
        gpu_memory_utilization=memory,
        enforce_eager=on_cpu if vllm.eager is None else vllm.eager,
        distributed_executor_backend="uni",
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        generation_config="vllm",
        # Pictures arrive as patches of bytes: there is nothing to process but the normalisation.
        mm_processor_cache_gb=0,
        mm_device_do_normalize=True,
        skip_mm_profiling=on_cpu,
        disable_log_stats=True,
        **extra,
    )
    try:
        return LLMEngine.from_engine_args(arguments)
    except Exception as error:
        raise SamplerError(
            f"the vLLM engine does not start: {type(error).__name__}: {error}. If memory is short, set "
            f"sampler.vllm.memory (now {memory:g}) or sampler.vllm.max_model_len; sampler=local needs no engine"
        ) from error
