"""From a request to a Sample with an engine that answers one question at a time: what both vLLM samplers share.

Action words are decided here, from the engine's log-probabilities of the allowed tokens and the episode's own random
stream: the draw is then the one that the local sampler makes. Free text is drawn by the engine, from a seed out of that
stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_agents.policies.action_words import ActionWords
from grpo_agents.policies.local import draw_index
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.rl.episode import Encoded, Sample

_SEEDS = 2**48
"""Seeds below this survive every JSON reader unchanged."""


@dataclass(frozen=True, eq=False)
class Question:
    """What an engine is asked: to go on after some tokens.

    Attributes:
        encoded: the prompt.
        tokens: the part of the reply that is settled.
        options: the tokens that may come next, ascending; None for free text.
        temperature: divides the logits.
        max_tokens: most tokens of the answer.
        seed: of the engine's own draws; None takes the likeliest tokens. With options one answer holds the
            log-probabilities of all of them, whichever was drawn.
    """

    encoded: Encoded
    tokens: tuple[int, ...]
    options: tuple[int, ...] | None
    temperature: float
    max_tokens: int
    seed: int | None

    def parameters(self, end_of_turn: int) -> dict[str, object]:
        """Keyword arguments of vLLM's `SamplingParams`.

        Args:
            end_of_turn: the only token that ends a free reply; a model's own list of ends may hold more.
        """
        common: dict[str, object] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "detokenize": False,
        }
        if self.options is not None:
            return common | {"allowed_token_ids": list(self.options), "logprobs": len(self.options)}
        drawn = {"temperature": 0.0} if self.seed is None else {"seed": self.seed}
        return common | drawn | {"stop_token_ids": [end_of_turn], "logprobs": 0}


@dataclass(frozen=True, eq=False)
class Answer:
    """Tokens as drawn, with their log-probabilities.

    Attributes:
        ids: the tokens.
        logprobs: natural log-probability of each.
        options: float64 (A,), log-probabilities of a question's options in their order; None for free text.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    options: NDArray[np.float64] | None = None


Ask = Callable[[Question], Awaitable[Answer]]


async def draw_reply(request: SampleRequest, ask: Ask, *, end_of_turn: int, version: int) -> Sample:
    """One reply.

    Args:
        request: what is wanted.
        ask: the engine.
        end_of_turn: token that ends a free reply.
        version: of the engine's weights.
    """
    if request.actions is None:
        return await _free_text(request, ask, end_of_turn, version)
    return await _action_word(request, request.actions, ask, version)


async def _free_text(request: SampleRequest, ask: Ask, end_of_turn: int, version: int) -> Sample:
    greedy = request.rng is None
    seed = None if request.rng is None else int(request.rng.integers(_SEEDS))
    # vLLM leaves the temperature out where it takes the likeliest token, and so does the record.
    temperature = 1.0 if greedy else request.temperature
    answer = await ask(Question(request.encoded, (), None, temperature, request.max_new_tokens, seed))
    stopped = bool(answer.ids) and answer.ids[-1] == end_of_turn
    return Sample(
        ids=np.array(answer.ids, dtype=np.int64),
        logprobs=np.array(answer.logprobs, dtype=np.float32),
        allowed=None,
        choice=None,
        choice_probs=None,
        policy_version=version,
        temperature=temperature,
        greedy=greedy,
        finish="stop" if stopped else "length",
    )


async def _action_word(request: SampleRequest, actions: ActionWords, ask: Ask, version: int) -> Sample:
    ids: list[int] = []
    logprobs: list[float] = []
    allowed: list[tuple[int, ...]] = []
    first: NDArray[np.float64] | None = None
    node = actions.root
    while node.rest is None:
        options, pick, logprob = node.options, 0, 0.0
        if not node.forced:
            answer = await ask(Question(request.encoded, tuple(ids), options, request.temperature, 1, None))
            assert answer.options is not None
            row = answer.options - np.logaddexp.reduce(answer.options)
            pick = draw_index(row, request.rng)
            logprob = float(row[pick])
            first = row if first is None else first
        ids.append(options[pick])
        logprobs.append(logprob)
        allowed.append(options)
        node = node.children[options[pick]]
    rest, choice = node.rest
    probabilities = None
    if first is not None:
        firsts = actions.first_tokens()
        column = {token: i for i, token in enumerate(sorted(set(firsts)))}
        probabilities = np.exp(first[[column[token] for token in firsts]]).astype(np.float32)
    return Sample(
        ids=np.array([*ids, *rest], dtype=np.int64),
        logprobs=np.array(logprobs + [0.0] * len(rest), dtype=np.float32),
        allowed=(*allowed, *((token,) for token in rest)),
        choice=choice,
        choice_probs=probabilities,
        policy_version=version,
        temperature=request.temperature,
        greedy=request.rng is None,
        finish="action",
    )
