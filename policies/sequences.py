"""Token sequences in the form a forward pass takes: what sampler, learner and supervised training share.

Shapes: B sequences, S tokens after the shared prefix, C target tokens of a sequence, A allowed tokens, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from grpo_agents.rl.episode import Encoded, Sample


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """A prompt, the tokens after it, and which of all tokens are to be predicted.

    Attributes:
        encoded: the prompt (for supervised training: the whole conversation).
        completion: int64 (C,), tokens after the prompt.
        targets: indices into prompt + completion of the tokens to predict, ascending.
        allowed: for each target the ids it was chosen from; None for the whole vocabulary.
        features: vision features of the prompt, computed before; None to compute them from the pixels.
    """

    encoded: Encoded
    completion: NDArray[np.int64]
    targets: Sequence[int]
    allowed: tuple[tuple[int, ...], ...] | None = None
    features: Tensor | None = None

    @classmethod
    def of_sample(cls, encoded: Encoded, sample: Sample) -> TokenSequence:
        """The sequence of one sampled reply; every token that was a decision is a target."""
        decisions = sample.decisions.tolist()
        allowed = None if sample.allowed is None else tuple(sample.allowed[i] for i in decisions)
        start = len(encoded.layout.ids)
        return cls(encoded, sample.ids, [start + i for i in decisions], allowed, sample.features)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """B sequences that share P prefix tokens, padded on the right.

    Padding needs no attention mask: under causal attention no token sees what stands to its right.

    Attributes:
        prefix_ids, prefix_positions: (P,) and (3, P); computed once for all sequences.
        ids, positions: (B, S) and (3, B, S), the inputs after the prefix.
        visual: bool (B, S), where vision features take the place of embeddings.
        sources: the prompts, for computing vision features.
        features: (1 + D, number of visual tokens in all, hidden), or None.
        index: (B, C), for each target the position in S whose output predicts it.
        targets: (B, C) token ids.
        mask: bool (B, C), False for padding.
        allowed: (B, C, A) token ids padded with -1, or None for the whole vocabulary.
    """

    prefix_ids: Tensor
    prefix_positions: Tensor
    ids: Tensor
    positions: Tensor
    visual: Tensor
    sources: tuple[Encoded, ...]
    features: Tensor | None
    index: Tensor
    targets: Tensor
    mask: Tensor
    allowed: Tensor | None

    def __len__(self) -> int:
        return self.ids.shape[0]

    def without_prefix(self) -> TokenBatch:
        """The same sequences with the prefix in every row, for passes that cannot have a cache."""
        rows, prefix = len(self), len(self.prefix_ids)
        return replace(
            self,
            prefix_ids=self.prefix_ids[:0],
            prefix_positions=self.prefix_positions[:, :0],
            ids=torch.cat([self.prefix_ids.expand(rows, -1), self.ids], dim=1),
            positions=torch.cat([self.prefix_positions[:, None].expand(-1, rows, -1), self.positions], dim=2),
            visual=F.pad(self.visual, (prefix, 0)),
            index=self.index + prefix,
        )


def collate(sequences: Sequence[TokenSequence], pad_id: int, device: torch.device | str = "cpu") -> TokenBatch:
    """Put sequences into one batch. Sequences with and without `allowed` do not mix."""
    prefix = _shared_prefix(sequences)
    layouts = [sequence.encoded.layout for sequence in sequences]
    # Every row reaches to its last picture: features are laid into the placeholders of all rows in order.
    pictures = [layout.spans[-1].start + layout.spans[-1].count if layout.spans else 0 for layout in layouts]
    lengths = [
        max(*sequence.targets[-1:], end, prefix + 1) - prefix for sequence, end in zip(sequences, pictures, strict=True)
    ]
    rows, width = len(sequences), max(lengths)
    columns = max(len(sequence.targets) for sequence in sequences)
    ids = np.full((rows, width), pad_id, dtype=np.int64)
    positions = np.zeros((3, rows, width), dtype=np.int64)
    visual = np.zeros((rows, width), dtype=bool)
    index = np.zeros((rows, columns), dtype=np.int64)
    targets = np.full((rows, columns), pad_id, dtype=np.int64)
    mask = np.zeros((rows, columns), dtype=bool)
    for row, (sequence, layout, length) in enumerate(zip(sequences, layouts, lengths, strict=True)):
        tokens = np.concatenate([layout.ids, sequence.completion])
        after = layout.next_position + np.arange(len(sequence.completion))
        places = np.concatenate([layout.position_ids, np.broadcast_to(after, (3, len(after)))], axis=1)
        ids[row, :length] = tokens[prefix : prefix + length]
        positions[:, row, :length] = places[:, prefix : prefix + length]
        for span in layout.spans:
            visual[row, span.start - prefix : span.start - prefix + span.count] = True
        wanted = np.fromiter(sequence.targets, dtype=np.int64)
        index[row, : len(wanted)] = wanted - 1 - prefix
        targets[row, : len(wanted)] = tokens[wanted]
        mask[row, : len(wanted)] = True

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    features = [sequence.features for sequence in sequences]
    present = [feature for feature in features if feature is not None]
    first = layouts[0]
    return TokenBatch(
        prefix_ids=tensor(first.ids[:prefix]),
        prefix_positions=tensor(first.position_ids[:, :prefix]),
        ids=tensor(ids),
        positions=tensor(positions),
        visual=tensor(visual),
        sources=tuple(sequence.encoded for sequence in sequences),
        features=torch.cat(present, dim=1).to(device) if len(present) == rows else None,
        index=tensor(index),
        targets=tensor(targets),
        mask=tensor(mask),
        allowed=_allowed(sequences, columns, device),
    )


def _shared_prefix(sequences: Sequence[TokenSequence]) -> int:
    """Number of leading tokens that every sequence has and that no picture and no target lies in."""
    first = sequences[0].encoded.layout
    limit = first.prefix
    for sequence in sequences:
        layout = sequence.encoded.layout
        limit = min(limit, layout.prefix, *(t - 1 for t in sequence.targets[:1]))
        if layout is not first and not np.array_equal(layout.ids[:limit], first.ids[:limit]):
            differs = layout.ids[:limit] != first.ids[:limit]
            limit = int(np.argmax(differs))
    return max(limit, 0)


def _allowed(sequences: Sequence[TokenSequence], columns: int, device: torch.device | str) -> Tensor | None:
    sets = [sequence.allowed for sequence in sequences]
    if all(allowed is None for allowed in sets):
        return None
    if any(allowed is None for allowed in sets):
        raise ValueError("replies chosen from action words and free replies cannot share a batch")
    widest = max(len(ids) for allowed in sets if allowed for ids in allowed)
    table = np.full((len(sets), columns, widest), -1, dtype=np.int64)
    table[:, :, 0] = 0  # padding columns keep one allowed token, so that no row is empty
    for row, allowed in enumerate(sets):
        for column, ids in enumerate(allowed or ()):
            table[row, column, : len(ids)] = ids
    return torch.from_numpy(table).to(device)
