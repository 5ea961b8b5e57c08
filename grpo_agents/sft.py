"""Supervised fine-tuning on chats: `python -m grpo_agents.sft data=chats.jsonl output=runs/warm-start`.

The loss is the mean negative log-likelihood of the assistant's tokens, end-of-turn tokens included. LoRA or all weights,
the vision tower frozen or trained, as `policy.*` says. The result is a peft adapter; with policy.lora.rank=0 it is a whole
model, from which a GRPO run starts with policy.model=FOLDER.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_agents.config import SftConfig
from grpo_agents.errors import ConfigError, RecordError
from grpo_agents.run.command import run_command
from grpo_agents.run.config import parse
from grpo_agents.run.seeding import Streams

if TYPE_CHECKING:
    from grpo_agents.policies.qwen_vl import QwenVL
    from grpo_agents.policies.sequences import TokenSequence
    from grpo_agents.rl.episode import Prompt


def main(argv: Sequence[str]) -> int:
    config = parse(SftConfig, list(argv), prog="python -m grpo_agents.sft", summary=__doc__ or "")
    report = finetune(config)
    accuracy = "nothing held out" if math.isnan(report["accuracy"]) else f"held-out accuracy {report['accuracy']:.3f}"
    print(f"loss {report['loss']:.3f}, {accuracy}; saved to {config.output}")
    return 0


def finetune(config: SftConfig) -> dict[str, float]:
    """Train on the chats and save the result.

    Returns:
        loss: mean loss of the last tenth of the steps; accuracy: share of held-out assistant tokens that are the
        likeliest (NaN when nothing is held out).

    Raises:
        ConfigError: the data are no chats, or the output cannot be written to.
        RecordError: the chat template writes a chat's turns in a form that cannot be told apart.
    """
    from grpo_agents.run.chats import read_chats

    chats = read_chats(config.data)
    _prepare_output(Path(config.output))
    import torch

    from grpo_agents.policies.qwen_vl import QwenVL
    from grpo_agents.policies.sequences import collate

    streams = Streams(config.seed)
    policy = QwenVL.load(config.policy, seed=streams.seed("adapter"))
    sequences = [supervised_sequence(chat, policy) for chat in chats]
    order = streams.generator("split").permutation(len(sequences))
    held_out = [sequences[i] for i in order[: int(len(sequences) * config.holdout)]]
    training = [sequences[i] for i in order[len(held_out) :]]
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(config.warmup, 1), _cosine(step / config.steps))
    )
    losses: list[float] = []
    begin, shuffled = time.perf_counter(), np.empty(0, dtype=np.int64)
    for step in range(config.steps):
        if len(shuffled) < min(config.batch, len(training)):
            shuffled = np.concatenate([shuffled, streams.generator("epoch", step).permutation(len(training))])
        chosen, shuffled = shuffled[: config.batch], shuffled[config.batch :]
        batch = collate([training[i] for i in chosen], policy.pad_id, policy.device)
        logprobs, _ = policy(batch)
        loss = -logprobs.sum() / batch.mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.trainable_parameters(), config.max_grad_norm)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if (step + 1) % max(1, config.steps // 20) == 0:
            accuracy = f"  accuracy {token_accuracy(policy, held_out[:512]):.3f}" if held_out else ""
            seconds = time.perf_counter() - begin
            print(f"step {step + 1:>6}  loss {np.mean(losses[-50:]):.3f}{accuracy}  {seconds:.0f} s", flush=True)
    policy.save(Path(config.output))
    return {"loss": float(np.mean(losses[-max(1, config.steps // 10) :])), "accuracy": token_accuracy(policy, held_out)}


def _prepare_output(output: Path) -> None:
    """Find out before the training whether its result can be saved."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"output={output}: the folder cannot be made ({error.strerror or error})"]) from error


def supervised_sequence(chat: Prompt, policy: QwenVL) -> TokenSequence:
    """A conversation with its targets: the tokens of each assistant turn up to and with its end-of-turn token.

    Raises:
        RecordError: the chat template writes assistant turns in a form that cannot be told apart.
    """
    from grpo_agents.policies.sequences import TokenSequence

    encoded = policy.encode.encode(chat, add_generation_prompt=False)
    ids = encoded.layout.ids
    header = policy.encode.assistant_header
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(header))
    starts = np.flatnonzero((windows == header).all(axis=1)) + len(header)
    turns = sum(message.role == "assistant" for message in chat.messages)
    if len(starts) != turns:
        raise RecordError(f"a chat of {turns} assistant turns was written with {len(starts)} assistant headers")
    targets: list[int] = []
    for start in starts:
        ends = np.flatnonzero(ids[start:] == policy.end_of_turn)
        targets += range(start, start + int(ends[0]) + 1 if len(ends) else len(ids))
    return TokenSequence(encoded, np.empty(0, dtype=np.int64), targets)


def token_accuracy(policy: QwenVL, sequences: Sequence[TokenSequence], batch_size: int = 64) -> float:
    """Share of target tokens that are the model's likeliest token; NaN without sequences."""
    right = np.concatenate(token_hits(policy, sequences, batch_size) or [np.empty(0)])
    return float(right.mean()) if len(right) else math.nan


def token_hits(policy: QwenVL, sequences: Sequence[TokenSequence], batch_size: int = 64) -> list[Any]:
    """For each sequence a bool array over its targets: is the target the likeliest token?"""
    import torch

    from grpo_agents.policies.sequences import collate

    hits: list[Any] = []
    with torch.no_grad():
        for start in range(0, len(sequences), batch_size):
            batch = collate(sequences[start : start + batch_size], policy.pad_id, policy.device)
            right = (policy.token_logits(batch).argmax(-1) == batch.targets).cpu().numpy()
            hits += [row[mask] for row, mask in zip(right, batch.mask.cpu().numpy(), strict=True)]
    return hits


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
